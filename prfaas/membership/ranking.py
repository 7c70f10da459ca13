"""The classes of a `ClusterView`, each kept in load order, so that no decision and no report ever sorts the cluster."""

from bisect import bisect_left

from prfaas.cluster import Node, NodeId, NodeKind, RegionId

#: Less is better; among equals the order is that of the ids, the same everywhere.
Rank = tuple[int, ...]


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

    def check(self) -> None:
        assert self._sorted == sorted((rank, node) for node, rank in self._ranks.items()), "order and ranks differ"
        assert self.ids() == tuple(node for _, node in self._sorted), "the ids are of another order"


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
        here, pd, load = node.region == self._pd_region, node.kind is NodeKind.PD, node.load
        prefills, decodes = node.role.prefills and not load.draining, node.role.decodes and not load.draining
        waiting, running, held = load.queued_prefill_tokens, load.active_sequences, load.committed_tokens
        prefill_rank, decode_rank = (not load_known, waiting, held, running), (not load_known, running, held, waiting)
        self.remote_prefill.place(node.id, prefill_rank if prefills and not here and not pd else None)
        self.local_prefill.place(node.id, prefill_rank if prefills and here else None)
        self.decode.place(node.id, decode_rank if decodes and here and pd else None)

    def remove(self, node: NodeId) -> None:
        for ranking in (self.remote_prefill, self.local_prefill, self.decode):
            ranking.place(node, None)

    def check(self) -> None:
        for ranking in (self.remote_prefill, self.local_prefill, self.decode):
            ranking.check()
