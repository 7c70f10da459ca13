"""The canaries of one router process: what they ask, and what follows when the path gives wrong answers.

A node whose canaries come back wrong is left out of routing. The router stays ready meanwhile: what it serves is right.
It is not ready when it has been told to prefill remotely whatever can be (mode always) and nobody is left whom it could
trust with it: then the region's own nodes would take a load that they were not meant for.
"""

from random import random

from prfaas.cluster import ClusterView
from prfaas.config import CanaryConfig
from prfaas.flows.canary import Lesson, canary_loop
from prfaas.flows.serve import ServeParams
from prfaas.live.canary_ports import LiveCanaryPorts
from prfaas.request import TOKEN_BYTES, Mode
from prfaas.scheduling.canary import Canary, CanaryParams
from prfaas.tokenizer.port import Tokenizer

#: Different at their beginnings, so that no two have a prefix in common.
BEGINNINGS = ("One", "Several", "Before", "Why")
STORY = " canaries went down with the miners, and while they sang the air was good: item {number}, level {level}. "


def params_of(own: CanaryConfig) -> CanaryParams:
    return CanaryParams(
        period_s=own.period_s, failures=own.failures, max_share=own.max_share, skip_busy_ratio=own.skip_busy_ratio
    )


def lesson(tokenizer: Tokenizer, own: CanaryConfig) -> Lesson:
    return Lesson(
        prompts=[_prompt(tokenizer, beginning, own.prompt_tokens) for beginning in BEGINNINGS],
        output_tokens=own.output_tokens,
    )


def _prompt(tokenizer: Tokenizer, beginning: str, tokens: int) -> bytes:
    text, packed = beginning, b""
    while len(packed) < tokens * TOKEN_BYTES:
        number = len(text)
        text += "".join(STORY.format(number=number + at, level=(number + at) * 7 % 1009) for at in range(8))
        packed = tokenizer.encode(text, add_special_tokens=False)
    return packed[: tokens * TOKEN_BYTES]


class Canaries:
    """`run` in a task of its own."""

    def __init__(
        self, own: CanaryConfig, tokenizer: Tokenizer, canary: Canary, ports: LiveCanaryPorts, params: ServeParams
    ) -> None:
        self._own, self._tokenizer, self._params = own, tokenizer, params
        self.canary, self.ports = canary, ports

    async def run(self) -> None:
        await canary_loop(self.ports, self.canary, self._params, lesson(self._tokenizer, self._own))


def new_canary(own: CanaryConfig) -> Canary:
    return Canary(params_of(own), random)


def obstacle(view: ClusterView, mode: Mode, canary: Canary) -> str | None:
    """Why the router is not ready for the sake of its canaries; None when it is."""
    if mode is not Mode.ALWAYS or not canary.distrusted or not view.remote_prefill:
        return None
    poisoned = canary.poisoned
    if any(node not in poisoned for node in view.remote_prefill):
        return None
    [reason, *_] = [canary.reasons()[node] for node in sorted(view.remote_prefill)]
    return f"the remote path is poisoned, and mode always sends everything there ({reason})"
