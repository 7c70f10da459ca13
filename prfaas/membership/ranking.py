"""The classes of a `ClusterView`, each kept in load order, so that no decision and no report ever sorts the cluster."""

from bisect import bisect_left

from prfaas.cluster import Node, NodeId, NodeKind, RegionId, Role

#: Less is better; among equals the order is that of the ids, the same everywhere.
Rank = tuple[int, ...]
#: Looking up a member of an Enum costs more than comparing with it.
PREFILL, DECODE, PD = Role.PREFILL, Role.DECODE, NodeKind.PD


class Ranking:
    """Placing a node costs a bisection. A node without a rank is not in the class."""

    def __init__(self) -> None:
        self._ranks: dict[NodeId, Rank] = {}
        # Two lists in one order, so that the ids are had without taking the pairs apart.
        self._sorted: list[tuple[Rank, NodeId]] = []
        self._order: list[NodeId] = []
        self._ids: tuple[NodeId, ...] | None = ()

    def place(self, node: NodeId, rank: Rank | None) -> None:
        before = self._ranks.pop(node, None)
        if before is not None:
            index = bisect_left(self._sorted, (before, node))
            del self._sorted[index], self._order[index]
        if rank is not None:
            index = bisect_left(self._sorted, (rank, node))
            self._sorted.insert(index, (rank, node))
            self._order.insert(index, node)
            self._ranks[node] = rank
        if before != rank:
            self._ids = None

    def ids(self) -> tuple[NodeId, ...]:
        """From least to most loaded."""
        if self._ids is None:
            self._ids = tuple(self._order)
        return self._ids

    def ranked(self) -> tuple[tuple[Rank, NodeId], ...]:
        """As `ids`, with the ranks."""
        return tuple(self._sorted)

    def ranks(self) -> dict[NodeId, Rank]:
        return self._ranks.copy()

    def check(self) -> None:
        assert self._sorted == sorted((rank, node) for node, rank in self._ranks.items()), "order and ranks differ"
        assert self.ids() == tuple(node for _, node in self._sorted), "the ids are of another order"


def prefill_rank(load_known: bool, waiting_tokens: int, held_tokens: int, running: int) -> Rank:
    return not load_known, waiting_tokens, held_tokens, running


def decode_rank(load_known: bool, waiting_tokens: int, held_tokens: int, running: int) -> Rank:
    return not load_known, running, held_tokens, waiting_tokens


class Classes:
    """Where a node prefills or decodes follows from its region, kind and role:

    - outside the PD region, prefill workers are `remote_prefill`; PD nodes there belong to another cluster;
    - inside it, whatever prefills is `local_prefill`, and PD nodes that decode are `decode`.

    A draining node is in no class. Nodes whose load is not known come last.
    """

    def __init__(self, pd_region: RegionId) -> None:
        self._pd_region = pd_region
        self.remote_prefill, self.local_prefill, self.decode = Ranking(), Ranking(), Ranking()

    def place(self, node: Node, *, load_known: bool) -> None:
        load = node.load
        self.place_as(node, load_known, load.queued_prefill_tokens, load.committed_tokens, load.active_sequences)

    def place_as(self, node: Node, load_known: bool, waiting_tokens: int, held_tokens: int, running: int) -> None:
        """Place the node as if these were its load."""
        name, here, there = node.id, self.prefills_here(node), self.prefills_elsewhere(node)
        rank = prefill_rank(load_known, waiting_tokens, held_tokens, running) if here or there else None
        self.remote_prefill.place(name, rank if there else None)
        self.local_prefill.place(name, rank if here else None)
        decodes = self.decodes(node)
        self.decode.place(name, decode_rank(load_known, waiting_tokens, held_tokens, running) if decodes else None)

    def prefills_elsewhere(self, node: Node) -> bool:
        elsewhere = node.region != self._pd_region and node.kind is not PD
        return elsewhere and node.role is not DECODE and not node.load.draining

    def prefills_here(self, node: Node) -> bool:
        return node.region == self._pd_region and node.role is not DECODE and not node.load.draining

    def decodes(self, node: Node) -> bool:
        here = node.region == self._pd_region and node.kind is PD
        return here and node.role is not PREFILL and not node.load.draining

    def remove(self, node: NodeId) -> None:
        for ranking in (self.remote_prefill, self.local_prefill, self.decode):
            ranking.place(node, None)

    def check(self) -> None:
        for ranking in (self.remote_prefill, self.local_prefill, self.decode):
            ranking.check()
