"""The scheduler's half of the connector: which requests want something, and what of it is to be done in each step.

A load is asked for until blocks are allocated for it, then ordered once; a request whose load fails is computed, and
nothing is loaded for it again. What a request saves is ordered from 0 up to its prompt's end without a hole and never
twice, also when it is preempted and computed again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prfaas.engine.vllm.wish import Wish

#: Of each cache group, the request's blocks in order.
Blocks = tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens `start:stop` into these blocks; `start` is what the server's own prefix cache had."""

    request: str
    attempt: str
    blocks: Blocks
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Save:
    """After this step tokens `start:stop` are in these blocks; they are to be saved. `last`: the prompt ends here."""

    attempt: str
    blocks: Blocks
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """The request's first step; `computed` tokens were there before it."""

    attempt: str
    computed: int


@dataclass(slots=True)
class Orders:
    """What a step is to do, for the worker's half."""

    loads: list[Load] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a step. `blocks`: all it has if `fresh` (new, or resumed after preemption), else those that came
    to it; None: none came."""

    request: str
    blocks: Sequence[Sequence[int]] | None
    fresh: bool
    computed: int
    scheduled: int


@dataclass(slots=True)
class _Entry:
    wish: Wish
    prompt_tokens: int
    loading: bool = False
    begun: bool = False
    saved: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Books:
    """Requests that want nothing are not in it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._loads: list[Load] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: str, wish: Wish, prompt_tokens: int) -> None:
        self._entries[request] = _Entry(wish, prompt_tokens)

    def loadable(self, request: str, computed: int) -> int:
        """Tokens beyond the `computed` ones that can be loaded. The last one of a prompt cannot: its logits are
        needed. Nothing can once the request has begun: what it was to be loaded from is not held for it any more."""
        entry = self._entries.get(request)
        if entry is None or entry.loading or entry.begun:
            return 0
        return max(0, min(entry.wish.load, entry.prompt_tokens - 1) - computed)

    def allocated(self, request: str, blocks: Blocks, external: int) -> None:
        """Blocks are there for what was loadable."""
        entry = self._entries.get(request)
        if entry is None or entry.loading or not external:
            return
        entry.loading = True
        stop = min(entry.wish.load, entry.prompt_tokens - 1)
        self._loads.append(Load(request, entry.wish.attempt, tuple(map(list, blocks)), stop - external, stop))

    def step(self, scheduled: Iterable[Scheduled]) -> Orders:
        orders, self._loads = Orders(loads=self._loads), []
        for each in scheduled:
            if entry := self._entries.get(each.request):
                self._advance(entry, each, orders)
        return orders

    def finished(self, request: str) -> None:
        """Idempotent. What was ordered for it is then not done any more, or for nobody."""
        self._entries.pop(request, None)

    def _advance(self, entry: _Entry, each: Scheduled, orders: Orders) -> None:
        if not entry.begun:
            entry.begun = True
            orders.begins.append(Begin(entry.wish.attempt, each.computed))
        if not entry.wish.save or entry.saved >= entry.prompt_tokens:
            return
        if each.fresh:
            entry.blocks = [list(group) for group in each.blocks or ()]
        elif each.blocks is not None:
            # What does not fit is found where it is copied, and is the end of that attempt alone.
            for have, came in zip(entry.blocks, each.blocks, strict=False):
                have.extend(came)
        stop = min(each.computed + each.scheduled, entry.prompt_tokens)
        if stop <= entry.saved:
            return
        blocks, last = tuple(map(tuple, entry.blocks)), stop == entry.prompt_tokens
        orders.saves.append(Save(entry.wish.attempt, blocks, entry.saved, stop, last))
        entry.saved = stop
