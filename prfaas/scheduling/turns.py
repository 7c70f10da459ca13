"""Whose turn it is among those that wait.

Priorities come first, but waiting raises them: each `ageing_s` by one class, so that nobody starves. Within the best
class tenants share by deficit round robin: each round gives a tenant `quantum_tokens` times its weight to spend, and
what it does not spend is kept while it has something waiting. Rounds in which nobody could pay are skipped in one step.
Two tenants that wait in the same class all the while are never further apart, in tokens over weight, than the largest
request over either's weight and two quanta.
"""

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import NewType

Ticket = NewType("Ticket", int)


class Priority(Enum):
    """In order: who goes first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One request that waits for its turn."""

    ticket: Ticket
    tenant: str
    tokens: int
    sequences: int
    priority: Priority
    weight: float
    since_s: float


@dataclass(slots=True)
class _Line:
    """One tenant's requests, of each priority in the order they came."""

    weight: float
    deficit: float = 0.0
    tokens: int = 0
    sequences: int = 0
    waiting: dict[Priority, dict[Ticket, Waiting]] = field(default_factory=lambda: {each: {} for each in Priority})

    def heads(self) -> Iterator[Waiting]:
        return (next(iter(line.values())) for line in self.waiting.values() if line)

    def last(self, without: Container[Ticket]) -> Waiting | None:
        """Who would be served last; within a priority that is who came last."""
        tails = (
            next((each for each in reversed(line.values()) if each.ticket not in without), None)
            for line in self.waiting.values()
        )
        return max((each for each in tails if each is not None), key=lambda one: one.priority.rank, default=None)

    def everybody(self) -> Iterator[Waiting]:
        return (each for line in self.waiting.values() for each in line.values())


class Turns:
    def __init__(self, ageing_s: float, quantum_tokens: int) -> None:
        self._ageing_s, self._quantum_tokens = ageing_s, quantum_tokens
        #: In the order of the round: who was served last is last.
        self._lines: dict[str, _Line] = {}
        self._waiting: dict[Ticket, Waiting] = {}
        self._counts = dict.fromkeys(Priority, 0)
        self.tokens = self.sequences = 0
        self._largest = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiting

    def everybody(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def add(self, one: Waiting) -> None:
        line = self._lines.setdefault(one.tenant, _Line(one.weight))
        line.weight = one.weight
        line.waiting[one.priority][one.ticket] = self._waiting[one.ticket] = one
        self._count(line, one, 1)
        self._largest = max(self._largest, one.tokens + self._quantum_tokens * one.weight)

    def remove(self, ticket: Ticket) -> Waiting:
        one = self._waiting.pop(ticket)
        line = self._lines[one.tenant]
        del line.waiting[one.priority][ticket]
        self._count(line, one, -1)
        if not line.sequences:
            del self._lines[one.tenant]
        return one

    def take(self, fits: Callable[[Waiting], bool], now: float) -> Waiting | None:
        """Remove whose turn it is; None when nobody waits, or when that one does not fit: nobody is let past it."""
        if not self._lines:
            return None
        heads = [(line, min(line.heads(), key=lambda one: self._order(one, now))) for line in self._lines.values()]
        best = min(self.rank(head, now) for _, head in heads)
        contenders = [(line, head) for line, head in heads if self.rank(head, now) == best]
        rounds = [self._rounds(line, head) for line, head in contenders]
        fewest = min(rounds)
        line, chosen = contenders[rounds.index(fewest)]
        if not fits(chosen):
            return None
        for each, _ in contenders:
            each.deficit += fewest * self._quantum_tokens * each.weight
        line.deficit = max(0.0, line.deficit - chosen.tokens)
        self.remove(chosen.ticket)
        if chosen.tenant in self._lines:
            self._lines[chosen.tenant] = self._lines.pop(chosen.tenant)
        return chosen

    def rank(self, one: Waiting, now: float) -> int:
        """The class it has got to by waiting."""
        return max(0, one.priority.rank - int(max(0.0, now - one.since_s) / self._ageing_s))

    def ahead(self, tenant: str, weight: float, priority: Priority, now: float) -> float:
        """About how many sequences go before one that would come now: at most all of its class and better ones, and no
        more than its tenant's own by all the weights over its own."""
        total = sum(self._counts[each] for each in Priority if each.rank <= priority.rank)
        for each in list(Priority)[priority.rank + 1 :]:
            for waiting in self._lines.values():
                aged = takewhile(lambda one: self.rank(one, now) <= priority.rank, waiting.waiting[each].values())
                total += sum(one.sequences for one in aged)
        line = self._lines.get(tenant)
        own = (line.sequences if line is not None else 0) + 1
        others = sum(each.weight for name, each in self._lines.items() if name != tenant)
        return min(float(total), own * (others + weight) / weight - 1)

    def give_way(self, newcomer: Waiting, requests: int, tokens: int, now: float) -> list[Waiting]:
        """Who has to go so that the newcomer finds room, which lacks so many requests and tokens: the last of a worse
        class, or of its own class those of the tenant that takes most for its weight, while that is more than the
        newcomer's tenant then takes. Empty when that does not make room."""
        leaving: dict[Ticket, Waiting] = {}
        taken = {name: line.tokens / line.weight for name, line in self._lines.items()}
        own = taken.get(newcomer.tenant, 0.0) + newcomer.tokens / newcomer.weight
        while requests > 0 or tokens > 0:
            lasts = [(line.last(leaving), taken[name]) for name, line in self._lines.items()]
            places = [(self.rank(one, now), share, one) for one, share in lasts if one is not None]
            worst = max(places, key=lambda place: place[:2], default=None)
            if worst is None or worst[:2] <= (newcomer.priority.rank, own):
                return []
            one = leaving[worst[2].ticket] = worst[2]
            taken[one.tenant] -= one.tokens / self._lines[one.tenant].weight
            requests, tokens = requests - 1, tokens - one.tokens
        return [*leaving.values()]

    def check(self) -> None:
        assert self._waiting == {one.ticket: one for line in self._lines.values() for one in line.everybody()}
        assert self.tokens == sum(one.tokens for one in self._waiting.values())
        assert self.sequences == sum(one.sequences for one in self._waiting.values())
        assert self.sequences == sum(self._counts.values())
        for line in self._lines.values():
            assert line.sequences == sum(one.sequences for one in line.everybody()) > 0
            assert line.tokens == sum(one.tokens for one in line.everybody())
            assert 0 <= line.deficit <= self._largest

    def _order(self, one: Waiting, now: float) -> tuple[int, float, int]:
        return self.rank(one, now), one.since_s, one.ticket

    def _rounds(self, line: _Line, head: Waiting) -> int:
        """Until this tenant can pay for its first."""
        return max(0, math.ceil((head.tokens - line.deficit) / (self._quantum_tokens * line.weight)))

    def _count(self, line: _Line, one: Waiting, sign: int) -> None:
        line.tokens += sign * one.tokens
        line.sequences += sign * one.sequences
        self._counts[one.priority] += sign * one.sequences
        self.tokens += sign * one.tokens
        self.sequences += sign * one.sequences
