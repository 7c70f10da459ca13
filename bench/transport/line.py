"""Our pumps over an emulated WAN line: how much of the line a backlog gets, and what it costs in retransmissions."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.transport.flows import Flow, drain, run_flows
from bench.transport.nodes import Node, Settings
from bench.transport.ours import DEPTH, LAYOUT, POOL_BYTES, Pair
from bench.transport.transfers import REGION, Driver
from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.pump import messages as m
from tools.wan.rig import Line, Side, Wan

MBIT = 1000.0
CONGESTION = "bbr"
#: The allowance of the region pair, as a share of what the line can carry. The rest is what keeps its queue short.
PACED = 0.95
RTTS_MS = (10.0, 30.0, 80.0)
LOSSES = (0.0, 0.0001, 0.001)
_WARM_S, _WINDOW_S, _WINDOWS = 2.0, 2.0, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShare:
    """`line_ratio`: payload delivered, of the most that TCP can deliver on the line; `retrans_ratio`: segments sent
    again, of all that were sent."""

    mbit: float
    rtt_ms: float
    loss: float
    line_ratio: float
    retrans_ratio: float


def node_at(wan: Wan, side: Side, name: str, layout: KvLayout, pool_bytes: int) -> Node:
    settings = Settings(layout=layout, pool_bytes=pool_bytes, congestion=CONGESTION)
    return Node(name, settings, host=wan.address(side), prefix=wan.command(side, []))


def pace(node: Node, wan: Wan, share: float = 1.0) -> None:
    """The node's part of the region pair's allowance."""
    node.tell(m.Allow(REGION, wan.line.payload_bytes_per_s * PACED * share))


@contextmanager
def wan_pair(wan: Wan, layout: KvLayout = LAYOUT, pool_bytes: int = POOL_BYTES) -> Iterator[Pair]:
    source = node_at(wan, "a", "source", layout, pool_bytes)
    target = node_at(wan, "b", "target", layout, pool_bytes)
    with Driver(source, target) as driver:
        source.engine.fill(1)
        pace(source, wan)
        yield Pair(driver, source, target)


def share_of_line(rtt_ms: float, loss: float) -> LineShare:
    """Of a backlog that does not end, on lanes that have been in use for a while; the median of some windows."""
    line = Line(mbit=MBIT, rtt_ms=rtt_ms, loss=loss)
    with Wan(line) as wan, wan_pair(wan) as pair:
        flow = Flow(pair.driver, pair.transfer, DEPTH)
        flow.start()
        _run(flow, _WARM_S)
        sent, resent = wan.tcp_segments("a")
        rates = [_rate_in_window(flow, pair.target) for _ in range(_WINDOWS)]
        all_sent, all_resent = wan.tcp_segments("a")
        drain(pair.driver, [flow])
    return LineShare(
        mbit=MBIT,
        rtt_ms=rtt_ms,
        loss=loss,
        line_ratio=statistics.median(rates) / line.payload_bytes_per_s,
        retrans_ratio=(all_resent - resent) / max(1, all_sent - sent + all_resent - resent),
    )


def _rate_in_window(flow: Flow, target: Node) -> float:
    began, before = _reading(flow, target)
    _run(flow, _WINDOW_S)
    ended, after = _reading(flow, target)
    return (after - before) / (ended - began)


def _reading(flow: Flow, target: Node) -> tuple[float, int]:
    """What the target's pump has received, when it says so next."""
    last = target.load
    run_flows(flow.driver, [flow], lambda: target.load is not last)
    assert target.load is not None
    return target.loaded_at, target.load.received_bytes_total


def _run(flow: Flow, seconds: float) -> None:
    end = time.monotonic() + seconds
    run_flows(flow.driver, [flow], lambda: time.monotonic() >= end)
