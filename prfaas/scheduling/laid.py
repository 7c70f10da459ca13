"""The fold's view as it looks with a router's own work on top, made as far as a decision looks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from prfaas.cluster import Busy, Node, NodeId, NodeLoad
from prfaas.membership.ranking import Place, Ranking, Standing


class Work(NamedTuple):
    """A change to a node's load."""

    prefill_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    decoding: int = 0

    def plus(self, other: "Work") -> "Work":
        a, b, c, d, e = self
        f, g, h, i, j = other
        return Work(a + f, b + g, c + h, d + i, e + j)

    def reversed(self) -> "Work":
        return Work(-self.prefill_tokens, -self.sequences, -self.tokens, -self.kv_bytes, -self.decoding)

    def onto(self, load: NodeLoad) -> NodeLoad:
        """What is taken away was perhaps never reported, so nothing falls below 0."""
        free, total = load.kv_free_bytes, load.kv_total_bytes
        return NodeLoad(
            max(0, load.queued_prefill_tokens + self.prefill_tokens),
            max(0, load.active_sequences + self.sequences),
            max(0, load.committed_tokens + self.tokens),
            min(max(0, free - self.kv_bytes), max(total, free)) if self.kv_bytes else free,
            total,
            load.draining,
            max(0, load.decoding + self.decoding),
            load.waiting_decodes,
            load.max_batch,
            load.egress,
            load.prefill_busy_ratio,
            load.decode_busy_ratio,
            load.engine_kv_ratio,
        )

    def busy(self, load: NodeLoad) -> Busy:
        """Of the load with this on top. Worked out for every change to any node, unlike the load itself."""
        waiting, active = load.queued_prefill_tokens + self.prefill_tokens, load.active_sequences + self.sequences
        committed, decoding = load.committed_tokens + self.tokens, load.decoding + self.decoding
        waiting, active = waiting if waiting > 0 else 0, active if active > 0 else 0
        running = (decoding if decoding > 0 else 0) + load.waiting_decodes
        running = running if running > active else active
        return Busy(waiting, active, committed if committed > 0 else 0, running, load.max_batch)


NOTHING, HANDED_OVER = Work(), Work(decoding=1)


class Loads(Mapping[NodeId, NodeLoad]):
    """The loads of nodes with own work on top, made when asked for: decisions do without."""

    __slots__ = ("_nodes", "_own")

    def __init__(self, nodes: Mapping[NodeId, Node], own: Mapping[NodeId, Work]) -> None:
        self._nodes, self._own = nodes, own

    def __getitem__(self, name: NodeId) -> NodeLoad:
        return self._own[name].onto(self._nodes[name].load)

    def __iter__(self) -> Iterator[NodeId]:
        return (name for name in self._own if name in self._nodes)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Known(NamedTuple):
    """The load of a node is known if its last report is younger than that."""

    reported_at: Mapping[NodeId, float]
    since: float


class Merged(Sequence[NodeId]):
    """A class in load order: those that were not touched as the fold has them, and in between those that were, as far
    as they still belong to it."""

    __slots__ = ("_base", "_known", "_moved", "_nodes", "_place_of", "_ranking", "_standing", "_touched")

    def __init__(
        self,
        base: Sequence[NodeId],
        ranking: Ranking,
        nodes: Mapping[NodeId, Node],
        standing: Standing,
        place_of: Callable[[NodeId, Busy, bool], Place],
        known: Known,
    ) -> None:
        self._base, self._ranking, self._moved, self._touched = base, ranking, ranking.places(), ranking.members()
        self._nodes, self._standing, self._place_of, self._known = nodes, standing, place_of, known

    def __iter__(self) -> Iterator[NodeId]:
        nodes, touched, place_of, (reported_at, since) = self._nodes, self._touched, self._place_of, self._known
        moved = self._still_here()
        at, never = next(moved, None), -math.inf
        for name in self._base:
            if name in touched:
                continue
            if at is not None:
                place = place_of(name, nodes[name].busy, reported_at.get(name, never) > since)
                while at is not None and at < place:
                    yield at[-1]
                    at = next(moved, None)
            yield name
        if at is not None:
            yield at[-1]
            yield from (place[-1] for place in moved)

    def _still_here(self) -> Iterator[Place]:
        """A node may have left, drain or have changed its role without a report."""
        nodes, standing, mine = self._nodes, self._standing, self._ranking
        for place in self._moved:
            node = nodes.get(place[-1])
            if node is not None and mine in standing[node.traits]:
                yield place

    def __len__(self) -> int:
        return len(self._base)

    @overload
    def __getitem__(self, index: int) -> NodeId: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[NodeId, ...]: ...

    def __getitem__(self, index: int | slice) -> NodeId | tuple[NodeId, ...]:
        return tuple(self)[index]
