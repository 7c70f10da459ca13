"""The latest requests of this router, kept in bounded memory so that an operator can ask why one went where it went."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from prfaas.flows.story import Story
from prfaas.live.situation import Situation
from prfaas.request import Request, RequestId

MAX_KEPT = 2048


@dataclass(slots=True)
class Decided:
    """One request. `situation` is what its first route was chosen under; `outcome` is there once it has ended."""

    request_id: RequestId
    prompt_tokens: int
    story: Story
    begun_s: float
    situation: Situation | None = None
    outcome: dict[str, Any] = field(default_factory=dict)


class Decisions:
    """By the request's own id, and by the one that its client gave it. The oldest is forgotten first."""

    def __init__(self, limit: int = MAX_KEPT, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._now = limit, now
        self._kept: OrderedDict[RequestId, Decided] = OrderedDict()
        self._aliases: OrderedDict[str, RequestId] = OrderedDict()

    def begun(self, request: Request, story: Story) -> None:
        self._kept[request.id] = Decided(request.id, request.prompt_tokens, story, self._now())
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def routed(self, request: Request, situation: Situation) -> None:
        if (decided := self._kept.get(request.id)) is not None:
            decided.situation = situation

    def ended(self, request_id: RequestId, alias: str, outcome: dict[str, Any]) -> None:
        if (decided := self._kept.get(request_id)) is None:
            return
        decided.outcome = outcome
        self._aliases[alias] = request_id
        while len(self._aliases) > self._limit:
            self._aliases.popitem(last=False)

    def find(self, name: str) -> Decided | None:
        """By either id, or by an answer's id, which is the request's with a prefix."""
        known = self._aliases.get(name, RequestId(name.rpartition("-")[2]))
        return self._kept.get(known) or self._kept.get(RequestId(name))

    def latest(self, count: int) -> list[Decided]:
        """The latest first."""
        return list(islice(reversed(self._kept.values()), count))

    def __len__(self) -> int:
        return len(self._kept)
