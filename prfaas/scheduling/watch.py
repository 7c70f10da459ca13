"""How busy nodes were between two rounds of the slow loop.

A report covers one second: in it a node that prefills was all busy or not at all, and a cluster that serves half of
what it could looks overfull every now and then. What the model expects is a mean, and what it is compared with must be
one too: of busy ratios, queues and arrivals, over the same minutes. They begin anew when anything changes that they
depend on, which is the threshold that routing follows, the roles, and the kind of traffic.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prfaas.cluster import Node, NodeId, NodeLoad
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.readings import known

#: Where the lengths rest on no more than this part of the requests of a moment ago, the others were of another kind.
FORGOTTEN = 0.9


@dataclass(slots=True)
class _Mean:
    """Over the time since the beginning; what is older than `memory_s` fades."""

    memory_s: float
    value: float | None = None
    seconds: float = 0.0

    def add(self, value: float | None, elapsed_s: float) -> None:
        if value is None or elapsed_s <= 0:
            return
        self.seconds += elapsed_s
        weight = max(elapsed_s / self.seconds, 1 - math.exp(-elapsed_s / self.memory_s))
        self.value = value if self.value is None else self.value + weight * (value - self.value)


class _Loads:
    """Of one node."""

    def __init__(self, memory_s: float) -> None:
        self.prefill, self.decode, self.queued_tokens = _Mean(memory_s), _Mean(memory_s), _Mean(memory_s)

    def add(self, load: NodeLoad, elapsed_s: float) -> None:
        self.prefill.add(known(load.prefill_busy_ratio), elapsed_s)
        self.decode.add(known(load.decode_busy_ratio), elapsed_s)
        self.queued_tokens.add(known(load.queued_prefill_tokens), elapsed_s)


@dataclass(slots=True)
class Watch:
    """What is older than `memory_s` fades."""

    memory_s: float
    #: The threshold in force and the shares under which all of this was seen.
    _under: tuple[int, tuple[tuple[NodeId, float], ...]] | None = None
    _loads: dict[NodeId, _Loads] = field(default_factory=dict)
    _arrivals: _Mean = field(init=False)
    _seen_at: float | None = None
    #: On how many requests the lengths rested then.
    _requests: float = 0.0

    def __post_init__(self) -> None:
        self._arrivals = _Mean(self.memory_s)

    @property
    def seconds(self) -> float | None:
        """For how long this has been seen; None when nobody has looked yet."""
        return None if self._seen_at is None else self._arrivals.seconds

    @property
    def threshold_tokens(self) -> int | None:
        return None if self._under is None else self._under[0]

    @property
    def arrivals_per_s(self) -> float | None:
        return self._arrivals.value

    def see(self, nodes: Iterable[Node], threshold_tokens: int, demand: DemandSnapshot | None, now: float) -> None:
        """Once per report."""
        elapsed_s = 0.0 if self._seen_at is None else max(0.0, now - self._seen_at)
        self._seen_at = now
        seen = sorted(nodes, key=lambda node: node.id)
        under = threshold_tokens, tuple((node.id, node.share) for node in seen)
        before, self._requests = self._requests, demand.counts.total if demand is not None else 0.0
        if under != self._under or self._requests < FORGOTTEN * before:
            self._under, self._loads, self._arrivals = under, {}, _Mean(self.memory_s)
            return
        self._arrivals.add(known(demand.arrivals_per_s) if demand is not None else None, elapsed_s)
        for node in seen:
            self._loads.setdefault(node.id, _Loads(self.memory_s)).add(node.load, elapsed_s)

    def averaged(self, node: Node) -> Node:
        """The node as busy as it was on average; as it is where nobody has looked."""
        if self._seen_at is None:
            return node
        mean = self._loads.get(node.id) or _Loads(self.memory_s)
        load = replace(
            node.load,
            prefill_busy_ratio=mean.prefill.value,
            decode_busy_ratio=mean.decode.value,
            queued_prefill_tokens=round(mean.queued_tokens.value or 0.0),
        )
        return replace(node, load=load)
