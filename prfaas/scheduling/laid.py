"""The fold's view as it looks with a router's own work on top, made as far as a decision looks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple, overload

from prfaas.cluster import Node, NodeId, NodeLoad
from prfaas.membership.ranking import Rank

_FIELDS = tuple(field.name for field in fields(NodeLoad))
_values_of = attrgetter(*_FIELDS)
_SETTERS = {name: getattr(NodeLoad, name).__set__ for name in _FIELDS}


def copy_load(original: NodeLoad, **changes: int) -> NodeLoad:
    """`dataclasses.replace` for this one kind, several times as fast: it is made for every change to any node."""
    made = object.__new__(NodeLoad)
    for put, value in zip(_SETTERS.values(), _values_of(original), strict=True):
        put(made, value)
    for name, value in changes.items():
        _SETTERS[name](made, value)
    return made


class Work(NamedTuple):
    """A change to a node's load."""

    prefill_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    decoding: int = 0

    def plus(self, other: "Work") -> "Work":
        return Work(
            self.prefill_tokens + other.prefill_tokens,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.kv_bytes + other.kv_bytes,
            self.decoding + other.decoding,
        )

    def reversed(self) -> "Work":
        return Work(-self.prefill_tokens, -self.sequences, -self.tokens, -self.kv_bytes, -self.decoding)

    def onto(self, load: NodeLoad) -> NodeLoad:
        """What is taken away was perhaps never reported, so nothing falls below 0."""
        return copy_load(
            load,
            queued_prefill_tokens=max(0, load.queued_prefill_tokens + self.prefill_tokens),
            active_sequences=max(0, load.active_sequences + self.sequences),
            committed_tokens=max(0, load.committed_tokens + self.tokens),
            kv_free_bytes=min(max(0, load.kv_free_bytes - self.kv_bytes), max(load.kv_total_bytes, load.kv_free_bytes)),
            decoding=max(0, load.decoding + self.decoding),
        )


NOTHING = Work()


class Merged(Sequence[NodeId]):
    """A class in load order: those that were not touched as the fold has them, and in between those that were, as far
    as they still belong to it."""

    __slots__ = ("_base", "_belongs", "_moved", "_nodes", "_rank_of", "_ranks")

    def __init__(
        self,
        base: Sequence[NodeId],
        moved: Sequence[tuple[Rank, NodeId]],
        ranks: Mapping[NodeId, Rank],
        nodes: Mapping[NodeId, Node],
        belongs: Callable[[Node], bool],
        rank_of: Callable[[NodeId], Rank],
    ) -> None:
        self._base, self._moved, self._ranks = base, moved, ranks
        self._nodes, self._belongs, self._rank_of = nodes, belongs, rank_of

    def __iter__(self) -> Iterator[NodeId]:
        ranks, moved = self._ranks, self._still_here()
        at = next(moved, None)
        for name in self._base:
            if name in ranks:
                continue
            if at is not None:
                place = (self._rank_of(name), name)
                while at is not None and at < place:
                    yield at[1]
                    at = next(moved, None)
            yield name
        if at is not None:
            yield at[1]
            yield from (name for _, name in moved)

    def _still_here(self) -> Iterator[tuple[Rank, NodeId]]:
        """A node may have left, drain or have changed its role without a report."""
        for place in self._moved:
            node = self._nodes.get(place[1])
            if node is not None and self._belongs(node):
                yield place

    def __len__(self) -> int:
        return len(self._base)

    @overload
    def __getitem__(self, index: int) -> NodeId: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[NodeId, ...]: ...

    def __getitem__(self, index: int | slice) -> NodeId | tuple[NodeId, ...]:
        return tuple(self)[index]
