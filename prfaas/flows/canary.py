"""A request with a known answer, along the real path: prefilled on one node, sent, and decoded on another.

What is right is learned on the decode node itself, which prefills and answers the same prompt alone: then nothing was
sent, and what differs is what the path did. There are several prompts, so that KV which a path delivers from an earlier
canary is not taken for right. Caches play no part: what they hold would hide what the path does.

Two answers that differ where the two likeliest tokens were as good as equal are both right: hardware of two kinds
rounds differently.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId, Role
from prfaas.errors import EngineFailed, PrfaasError, TransferFailed
from prfaas.flows.failures import OnPrefillFailure
from prfaas.flows.ports import ServePorts
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Story
from prfaas.request import NO_MATCHES, TOKEN_BYTES, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.canary import LOOK_S, Canary, Probe, Verdict

TENANT = "prfaas-canary"
#: What a tie is judged by: how many of the highest logits, and how near the best two are as a part of their spread.
TOP_LOGITS, TIE = 8, 1e-3
#: By the fault of the path. What is slow or full is load's, and breakers' to judge; who is gone, membership's.
FAILURES = (TransferFailed, EngineFailed)


class CanaryPorts(ServePorts, Protocol):
    """`routed` counts nothing here: demand is what users want."""

    def live_routers(self) -> int: ...

    def judged(self, probe: Probe, verdict: Verdict, detail: str) -> None:
        """For logs and metrics."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and of each by how much it was the best, as a part of the spread of the likeliest few, where the
    engine says."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]

    def differs(self, other: "Answer") -> str:
        """Where and how the other, of this as the right one; empty when it is as right. After a tie both go on in their
        own way."""
        for at, (ours, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if ours != theirs:
                tie = at < len(self.leads) and self.leads[at] < TIE
                return "" if tie else f"token {at} is {theirs} and not {ours}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(other.tokens)} tokens and not {len(self.tokens)}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is asked: one of `prompts`, all of the same length, packed; and for how many tokens."""

    prompts: Sequence[bytes]
    output_tokens: int


async def canary_loop(ports: CanaryPorts, canary: Canary, params: ServeParams, lesson: Lesson) -> None:
    """Until it is cancelled."""
    known: dict[tuple[NodeId, Incarnation, int], Answer] = {}
    number = 0
    while True:
        view = ports.view()
        prefills, decodes = senders(view), [view.nodes[name] for name in sorted(view.decode)]
        probe = canary.next(prefills, decodes, ports.live_routers(), ports.now())
        if probe is None:
            await ports.sleep(LOOK_S)
            continue
        number = (number + 1) % len(lesson.prompts)
        for key in [key for key in known if (node := view.nodes.get(key[0])) is None or node.incarnation != key[1]]:
            del known[key]
        begun = ports.now()
        verdict, detail = await _try(ports, probe, view, params, lesson, number, known)
        now = ports.now()
        canary.heard(probe, verdict, detail, now - begun, ports.live_routers(), now)
        ports.judged(probe, verdict, detail)


def senders(view: ClusterView) -> list[Node]:
    """All that prefill for others, in the order of their ids."""
    beside = [name for name in view.local_prefill if view.nodes[name].role is Role.PREFILL]
    return [view.nodes[name] for name in sorted({*view.remote_prefill, *beside})]


async def _try(
    ports: CanaryPorts,
    probe: Probe,
    view: ClusterView,
    params: ServeParams,
    lesson: Lesson,
    number: int,
    known: dict[tuple[NodeId, Incarnation, int], Answer],
) -> tuple[Verdict, str]:
    decode = view.nodes[probe.decode]
    key = (decode.id, decode.incarnation, number)
    try:
        if key not in known:
            known[key] = await _answer(ports, decode.model, probe.decode, probe.decode, params, lesson, number)
    except PrfaasError as error:
        return Verdict.SKIPPED, f"the right answer is not known: {error}"
    try:
        answer = await _answer(ports, decode.model, probe.prefill, probe.decode, params, lesson, number)
    except FAILURES as error:
        return Verdict.FAILED, str(error)
    except PrfaasError as error:
        return Verdict.SKIPPED, str(error)
    difference = known[key].differs(answer)
    return (Verdict.WRONG, difference) if difference else (Verdict.RIGHT, "")


async def _answer(
    ports: ServePorts, model: str, prefill: NodeId, decode: NodeId, params: ServeParams, lesson: Lesson, number: int
) -> Answer:
    prompt = lesson.prompts[number]
    request = Request(
        id=RequestId(ports.new_attempt()),
        model=model,
        prompt=prompt,
        sampling=Sampling(max_tokens=lesson.output_tokens),
        tenant=TENANT,
        top_logits=TOP_LOGITS,
    )
    moves = prefill != decode
    route = Route(
        prefill=prefill,
        decode=decode,
        path=Path.REMOTE if moves else Path.LOCAL,
        reason=Reason.MODE_ALWAYS if moves else Reason.MODE_NEVER,
        uncached_tokens=request.handoff_tokens,
        transfer_tokens=request.handoff_tokens if moves else 0,
        threshold_tokens=0,
        prefill_tokens=request.handoff_tokens,
        use_cache=False,
    )
    once = replace(
        params,
        max_attempts=1,
        max_migrations=0,
        on_prefill_failure=OnPrefillFailure.FAIL,
        choose=lambda *_: route,
    )
    tokens, leads = list[int](), list[float]()
    async with aclosing(serve(request, NO_MATCHES, once, ports, Story())) as batches:
        async for batch in batches:
            packed = batch.tokens
            for at in range(0, len(packed), TOKEN_BYTES):
                tokens.append(int.from_bytes(packed[at : at + TOKEN_BYTES], "little"))
            leads += [_lead(top) for top in batch.top_logits]
    return Answer(tuple(tokens), tuple(leads))


def _lead(top: Sequence[tuple[int, float]]) -> float:
    """Without logits nothing counts as a tie."""
    if len(top) < 2:
        return float("inf")
    spread = top[0][1] - top[-1][1]
    return (top[0][1] - top[1][1]) / spread if spread > 0 else 0.0
