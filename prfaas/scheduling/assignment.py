"""Which node takes which role: as few changes as possible, least loaded nodes first, ties by id.

A plan says how many nodes prefill and how many decode; nodes keep what they are wherever the plan has room for it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from prfaas.cluster import Node, NodeId

#: Shares of time that differ by less are the same: a change costs more than it brings.
SAME_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Change:
    node: NodeId
    before: float
    after: float


def same(one: float, other: float) -> bool:
    """A whole role is never the same as a mixed one, however small its other part."""
    whole = {0.0, 1.0}
    return one == other if one in whole or other in whole else abs(one - other) < SAME_SHARE


def changes(
    nodes: Sequence[Node],
    shares: Mapping[NodeId, float],
    wanted: Sequence[float],
    stuck: Collection[NodeId] = (),
) -> tuple[Change, ...]:
    """What turns `shares` into `wanted` (one entry per node, in any order), the largest changes first. Nodes that are
    stuck change last of all."""
    assert len(wanted) == len(nodes)
    open_shares = sorted(wanted)
    movers: list[Node] = []
    # Those that stay are the most loaded: moving a node means waiting until its work is done.
    for node in sorted(nodes, key=lambda node: (node.id in stuck, _load(node)), reverse=True):
        kept = next((share for share in open_shares if same(share, shares[node.id])), None)
        if kept is None:
            movers.append(node)
        else:
            open_shares.remove(kept)
    made = []
    for node in sorted(movers, key=lambda node: (-shares[node.id], _load(node))):
        after = open_shares.pop(0) if shares[node.id] >= 0.5 else open_shares.pop()
        made.append((abs(after - shares[node.id]), _load(node), Change(node.id, shares[node.id], after)))
    made.sort(key=lambda entry: (-entry[0], entry[1]))
    return tuple(map(itemgetter(2), made))


def _load(node: Node) -> tuple[int, int, NodeId]:
    load = node.load
    return load.queued_prefill_tokens + load.committed_tokens, load.active_sequences, node.id
