"""The classes of a `ClusterView`, each kept in load order, so that no decision and no report ever sorts the cluster."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import partial

from prfaas.cluster import Busy, Node, NodeId, NodeKind, RegionId, Role, Traits
from prfaas.remembered import Remembered

#: Less is better; among equals the order is that of the ids, the same everywhere.
Place = tuple[bool, int, int, int, NodeId]
#: Looking up a member of an Enum costs more than comparing with it.
PREFILL, DECODE, PD = Role.PREFILL, Role.DECODE, NodeKind.PD


class Ranking:
    """Placing a node costs a bisection. A node without a place is not in the class."""

    def __init__(self) -> None:
        self._places: dict[NodeId, Place] = {}
        # Two lists in one order, so that the ids are had without taking the places apart.
        self._sorted: list[Place] = []
        self._order: list[NodeId] = []
        self._ids: tuple[NodeId, ...] | None = ()

    def place(self, node: NodeId, place: Place | None) -> None:
        before = self._places.get(node)
        if before == place:
            return
        self._ids = None
        if before is not None:
            index = bisect_left(self._sorted, before)
            del self._sorted[index], self._order[index], self._places[node]
        if place is not None:
            index = bisect_left(self._sorted, place)
            self._sorted.insert(index, place)
            self._order.insert(index, node)
            self._places[node] = place

    def ids(self) -> tuple[NodeId, ...]:
        """From least to most loaded."""
        if self._ids is None:
            self._ids = tuple(self._order)
        return self._ids

    def places(self) -> list[Place]:
        """As `ids`, with the loads."""
        return self._sorted.copy()

    def members(self) -> Mapping[NodeId, Place]:
        """As they are now. It goes on with a copy, because Python copies a dict that much was deleted from slowly, and
        copies are without holes."""
        handed_out, self._places = self._places, self._places.copy()
        return handed_out

    def check(self) -> None:
        assert self._sorted == sorted(self._places.values()), "the order is another one"
        assert all(place[-1] == node for node, place in self._places.items()), "a place is another node's"
        assert self.ids() == tuple(place[-1] for place in self._sorted), "the ids are of another order"


def prefill_place(node: NodeId, busy: Busy, load_known: bool) -> Place:
    waiting, active, committed, _, _ = busy
    return not load_known, waiting, committed, active, node


def decode_place(node: NodeId, busy: Busy, load_known: bool) -> Place:
    waiting, active, committed, _, _ = busy
    return not load_known, active, committed, waiting, node


#: The rankings that nodes of some traits are in.
Standing = Remembered[Traits, tuple[Ranking, ...]]


class Classes:
    """Where a node prefills or decodes follows from its region, kind and role:

    - outside the PD region, prefill workers are `remote_prefill`; PD nodes there belong to another cluster;
    - inside it, whatever prefills is `local_prefill`, and PD nodes that decode are `decode`.

    A draining node is in no class. Nodes whose load is not known come last.
    """

    def __init__(self, pd_region: RegionId) -> None:
        self.remote_prefill, self.local_prefill, self.decode = Ranking(), Ranking(), Ranking()
        self.standing: Standing = Remembered(
            partial(_standing, pd_region, self.remote_prefill, self.local_prefill, self.decode)
        )
        self._in: dict[NodeId, tuple[Ranking, ...]] = {}

    def place(self, node: Node, *, load_known: bool) -> None:
        self.place_as(node, node.busy, load_known)

    def place_as(self, node: Node, busy: Busy, load_known: bool) -> None:
        """Place the node as if it were so busy."""
        name = node.id
        standing = self.standing[node.traits]
        if self._in.get(name) is not standing:
            self.remove(name)
            self._in[name] = standing
        for ranking in standing:
            place = decode_place if ranking is self.decode else prefill_place
            ranking.place(name, place(name, busy, load_known))

    def remove(self, node: NodeId) -> None:
        for ranking in self._in.pop(node, ()):
            ranking.place(node, None)

    def check(self) -> None:
        self.standing.check()
        for ranking in (self.remote_prefill, self.local_prefill, self.decode):
            ranking.check()
            assert {name for name, its in self._in.items() if ranking in its} == ranking.members().keys()


def _standing(
    pd_region: RegionId, remote_prefill: Ranking, local_prefill: Ranking, decode: Ranking, traits: Traits
) -> tuple[Ranking, ...]:
    if traits.draining:
        return ()
    if traits.region != pd_region:
        return (remote_prefill,) if traits.kind is not PD and traits.role is not DECODE else ()
    prefills, decodes = traits.role is not DECODE, traits.kind is PD and traits.role is not PREFILL
    return (*([local_prefill] if prefills else ()), *([decode] if decodes else ()))
