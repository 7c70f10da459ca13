"""A row of the table of compatibility: a setting, what of it works, and what is said of a server that differs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from prfaas.engine.vllm.facts import Facts


class Verdict(Enum):
    REFUSED = "refused"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class Rule:
    """`otherwise`: what is found that is not as `works` says, in a word or two, or None."""

    setting: str
    works: str
    verdict: Verdict
    otherwise: Callable[[Facts], str | None]
    why: str
    instead: str
    #: Which of our own settings it came by.
    ours: str = "worker.vllm_arguments"


@dataclass(frozen=True, slots=True)
class Finding:
    rule: Rule
    found: str

    def __str__(self) -> str:
        return f"{self.rule.setting} ({self.found}): {self.rule.why}; {self.rule.instead}"
