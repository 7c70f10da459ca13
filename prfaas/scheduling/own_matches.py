"""What the regions' caches hold of one prompt, and beside that what single engines hold by themselves."""

from collections.abc import Iterator, Mapping
from typing import TypeVar, overload

from prfaas.cluster import NodeId
from prfaas.request import Match, Matches

D = TypeVar("D")


class OwnMatches(Mapping[NodeId, Match]):
    """`own`: of nodes, best first, what their engines hold. These are named first: only there it is of use."""

    __slots__ = ("_own", "_shared")

    def __init__(self, shared: Matches, own: Mapping[NodeId, Match]) -> None:
        self._shared, self._own = shared, own

    def __getitem__(self, name: NodeId) -> Match:
        match = self.get(name)
        if match is None:
            raise KeyError(name)
        return match

    @overload
    def get(self, name: NodeId, /) -> Match | None: ...
    @overload
    def get(self, name: NodeId, /, default: Match | D) -> Match | D: ...
    def get(self, name: NodeId, /, default: Match | D | None = None) -> Match | D | None:
        shared, own = self._shared.get(name), self._own.get(name)
        if own is None:
            return default if shared is None else shared
        return own if shared is None else Match(shared.joint, shared.kv, own.own)

    def __iter__(self) -> Iterator[NodeId]:
        yield from self._own
        yield from (name for name in self._shared if name not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)
