"""What a link between two regions can carry and how much of it is in use, from its senders' reports.

A sender learns what the line can carry only while something waits to be sent. So the estimate goes by goodput while
backlogged: a queue that lasts says what the line is, the short queue at the end of a transfer only what it is at least.
When nothing has been backlogged for a while the estimate recovers towards the configured line, or is forgotten where
none is configured: a link that was narrow once must not be taken for narrow for ever. Reports that are stale or not
numbers say nothing, and what nobody speaks of is not changed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.cluster import Egress, LinkState, Node, NodeId, RegionId
from prfaas.scheduling.readings import is_known, known

#: Source and target.
Pair = tuple[RegionId, RegionId]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParams:
    """`line_bytes_per_s`: what was bought, the ceiling of what is expected where nothing was measured lately."""

    line_bytes_per_s: Mapping[Pair, float] = field(default_factory=lambda: MappingProxyType({}))
    #: Time constant of all smoothing. Longer is calmer and slower to notice a cut.
    smoothing_s: float = 2.0
    #: A report older than this says nothing.
    stale_s: float = 5.0
    #: A queue that takes longer than this to send is the line's doing; a shorter one is the tail of a transfer.
    lasting_queue_s: float = 0.5
    #: Senders that use this much of what they measured were limited by the line.
    full_ratio: float = 0.8
    #: Without a backlog for so long the line is expected to carry more, twice as much after each further such time.
    recover_s: float = 5.0
    #: Below it for `abundant_after_s` the link is abundant, above the other at once scarce. A prefix fetched from the
    #: other region is extra traffic: the first leaves room for as much again, and the gap keeps the switch still.
    abundant_below: float = 0.5
    scarce_above: float = 0.75
    abundant_after_s: float = 10.0


class LinkEstimator:
    """One for all links that a router sees."""

    def __init__(self, params: LinkParams = LinkParams()) -> None:
        self._params = params
        self._reports: dict[NodeId, _Report] = {}
        self._links: dict[Pair, _Link] = {}
        for pair, line in sorted(params.line_bytes_per_s.items()):
            self._links[pair] = _Link(pair, line if is_known(line) else None, params)

    def report(self, node: Node, now: float) -> None:
        """Telemetry of a node has arrived."""
        self.report_of(node.id, node.region, node.load.egress, now)

    def report_of(self, name: NodeId, region: RegionId, egress: Sequence[Egress], now: float) -> None:
        """What somebody in `region` sends. A report with nonsense in it is none."""
        if not all(map(_sound, egress)):
            return
        self._reports[name] = _Report(region, tuple(egress), now)
        for each in egress:
            pair = (region, each.region)
            if pair not in self._links:
                self._links[pair] = _Link(pair, None, self._params)

    def update(self, now: float) -> Mapping[Pair, LinkState]:
        """Take the reports into the estimates; once per report period."""
        fresh = {name: report for name, report in self._reports.items() if now - report.at <= self._params.stale_s}
        heard: dict[RegionId, float] = {}
        sending: dict[Pair, list[Egress]] = {}
        for report in fresh.values():
            heard[report.region] = max(report.at, heard.get(report.region, -math.inf))
            for egress in report.egress:
                sending.setdefault((report.region, egress.region), []).append(egress)
        self._reports = fresh
        for pair, link in self._links.items():
            if pair[0] in heard:
                link.update(sending.get(pair, ()), heard[pair[0]], now)
        return self.links(now)

    def links(self, now: float) -> Mapping[Pair, LinkState]:
        return MappingProxyType({pair: self._links[pair].state(now) for pair in sorted(self._links)})

    def abundant(self, target: RegionId) -> bool:
        """Whether all known links into a region have room to spare. Nothing known: no."""
        into = [link for pair, link in self._links.items() if pair[1] == target]
        return bool(into) and all(link.abundant for link in into)

    def check(self) -> None:
        for link in self._links.values():
            link.check()


@dataclass(frozen=True, slots=True)
class _Report:
    region: RegionId
    egress: tuple[Egress, ...]
    at: float


class _Link:
    def __init__(self, pair: Pair, line: float | None, params: LinkParams) -> None:
        self._pair, self._line, self._params = pair, line, params
        self.capacity = line
        #: The last value that was measured rather than recovered to, and when.
        self._measured: float | None = None
        self._measured_at = -math.inf
        self.goodput: float | None = None
        self.queued_bytes = 0
        self.queue_age_s = self._stalled_s = 0.0
        self.rtt_s: float | None = None
        #: Smoothed bytes per second, of the senders that count what they retransmit.
        self._counted = self._retransmitted = 0.0
        self.abundant = False
        self._calm_since: float | None = None
        self._heard_at = self._updated_at = -math.inf

    def update(self, senders: Sequence[Egress], heard_at: float, now: float) -> None:
        if heard_at <= self._heard_at:
            return  # nothing new
        elapsed_s = min(now - self._updated_at, self._params.stale_s)
        weight = 1 - math.exp(-elapsed_s / self._params.smoothing_s)
        sent = math.fsum(each.sent_bytes_per_s for each in senders)
        self.goodput = sent if self.goodput is None else self.goodput + weight * (sent - self.goodput)
        self.queued_bytes = sum(each.queued_bytes for each in senders)
        self.queue_age_s = max((each.queue_age_s for each in senders), default=0.0)
        # Who waits for nothing says nothing, and one who is answered shows that the line carries.
        self._stalled_s = min((each.stalled_s for each in senders if each.stalled_s is not None), default=0.0)
        self._look_at_lanes(senders, weight)
        measured = _carried_while_backlogged(senders)
        if measured is None:
            self._recover(elapsed_s, now)
        else:
            self._measure(measured, sent, weight, now)
        if self.capacity is not None:
            self.capacity = max(self.capacity, self.goodput)  # it has just carried that
        self._switch(now)
        self._heard_at, self._updated_at = heard_at, now

    def state(self, now: float) -> LinkState:
        return LinkState(
            source=self._pair[0],
            target=self._pair[1],
            capacity_bytes_per_s=self.capacity,
            goodput_bytes_per_s=self.goodput,
            utilization=self._utilization(),
            queued_bytes=self.queued_bytes,
            age_s=now - self._heard_at,
            rtt_s=self.rtt_s,
            retransmitted_ratio=self._retransmitted_ratio(),
            queue_age_s=self.queue_age_s,
            stalled_s=self._stalled_s if now - self._heard_at <= self._params.stale_s else 0.0,
        )

    def check(self) -> None:
        assert self.capacity is None or 0 <= self.capacity < math.inf
        assert self.capacity is None or self.goodput is None or self.capacity >= self.goodput
        assert not (self.abundant and self._calm_since is None)
        assert self.rtt_s is None or is_known(self.rtt_s)

    def _look_at_lanes(self, senders: Sequence[Egress], weight: float) -> None:
        """The smallest round trip is the one that a queue along the way has lengthened least. Without lanes the last
        one stands, because the way has not changed; retransmissions are forgotten with the traffic that they were part
        of."""
        shortest = min((rtt_s for each in senders if (rtt_s := known(each.rtt_s)) is not None), default=None)
        if shortest is not None:
            self.rtt_s = shortest if self.rtt_s is None else self.rtt_s + weight * (shortest - self.rtt_s)
        counting = [each for each in senders if each.retransmitted_bytes_per_s is not None]
        retransmitted = math.fsum(each.retransmitted_bytes_per_s or 0.0 for each in counting)
        sent = math.fsum(each.sent_bytes_per_s for each in counting)
        self._retransmitted += weight * (retransmitted - self._retransmitted)
        self._counted += weight * (sent + retransmitted - self._counted)

    def _retransmitted_ratio(self) -> float | None:
        return min(1.0, self._retransmitted / self._counted) if self._counted >= LEAST_TRAFFIC else None

    def _measure(self, measured: float, sent: float, weight: float, now: float) -> None:
        lasting = self.queued_bytes > self._params.lasting_queue_s * measured
        limited = lasting or sent >= self._params.full_ratio * measured
        if self.capacity is None:
            self.capacity = measured
        elif limited or measured > self.capacity:
            self.capacity += weight * (measured - self.capacity)
        if self.capacity <= measured or limited:
            self._measured, self._measured_at = self.capacity, now

    def _recover(self, elapsed_s: float, now: float) -> None:
        if self.capacity is None or now - self._measured_at < self._params.recover_s:
            return
        start = self._measured if self._measured is not None else self.capacity
        grown = max(self.capacity, start, 1.0) * math.exp2(elapsed_s / self._params.recover_s)
        if self._line is not None:
            self.capacity = min(grown, max(self._line, self.capacity))
        else:
            self.capacity = grown if grown < FORGOTTEN * max(start, 1.0) else None

    def _utilization(self) -> float | None:
        if self.capacity is None or self.goodput is None:
            return None
        if self.capacity == 0:
            return 1.0 if self.queued_bytes else 0.0
        return self.goodput / self.capacity

    def _switch(self, now: float) -> None:
        use = self._utilization()
        queue_s = self.queued_bytes / self.capacity if self.capacity else math.inf if self.queued_bytes else 0.0
        if use is None or use > self._params.scarce_above or queue_s > 2 * self._params.lasting_queue_s:
            self.abundant, self._calm_since = False, None
        elif use < self._params.abundant_below and queue_s <= self._params.lasting_queue_s:
            self._calm_since = now if self._calm_since is None else self._calm_since
            self.abundant = self.abundant or now - self._calm_since >= self._params.abundant_after_s
        elif not self.abundant:
            self._calm_since = None


#: Bytes per second of which a share says nothing.
LEAST_TRAFFIC = 1.0
#: A measurement is forgotten when recovery has left it so many times behind.
FORGOTTEN = 16.0


def _carried_while_backlogged(senders: Iterable[Egress]) -> float | None:
    """What the line carried while senders waited for it; None when none did.

    A backlogged sender gets its share of the line, and shares it with those that are backlogged at the same moment. How
    many these are on average follows from how much of the time each was: what it sent over what it got. So senders that
    take turns count once, and senders that are always backlogged are added up. The others take their part of it, too.
    """
    backlogged, others = [], 0.0
    for each in senders:
        if each.backlogged_bytes_per_s is None:
            others += each.sent_bytes_per_s
        else:
            rate = each.backlogged_bytes_per_s
            busy = min(1.0, each.sent_bytes_per_s / rate) if rate > 0 else 1.0
            backlogged.append((rate, busy))
    if not backlogged:
        return None
    together = math.fsum(busy for _, busy in backlogged)
    if together <= 0:
        return others + max(rate for rate, _ in backlogged)
    weighed = math.fsum(busy * rate * (1 + together - busy) for rate, busy in backlogged)
    return others + weighed / together


def _sound(egress: Egress) -> bool:
    measured = (egress.sent_bytes_per_s, egress.queued_bytes, egress.queue_age_s)
    maybe = (egress.backlogged_bytes_per_s, egress.rtt_s, egress.retransmitted_bytes_per_s, egress.stalled_s)
    return all(map(is_known, measured)) and all(value is None or is_known(value) for value in maybe)
