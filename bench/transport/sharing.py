"""Who gets how much of one line, and whether something small and urgent gets through."""

import statistics
import time
from dataclasses import dataclass
from functools import partial

from bench.transport.flows import Flow, drain, run_flows
from bench.transport.line import MBIT, node_at, pace
from bench.transport.nodes import Node
from bench.transport.ours import LAYOUT, TOKENS, bulk
from bench.transport.transfers import Driver, Transfer
from tools.wan.rig import Line, Wan

LINE = Line(mbit=MBIT, rtt_ms=30)
POOL_BYTES = 8 * LAYOUT.span_bytes(TOKENS)
WEIGHTS = (3.0, 1.0)
#: 2 MiB that somebody waits for, and what they are marked with.
_SMALL_TOKENS, _URGENT = 32, 1
_WARM_S = 1.5
_RUNS, _PINGS = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """`even`: the greater of two equal transfers' shares by the smaller, of one pump; `even_pumps`: the same of two
    pumps in one region. `tenant_share`: what the heavier of two tenants got, by what its weight says. `urgent`: a small
    urgent transfer's time beneath a backlog, by its time alone."""

    even: float
    even_pumps: float
    tenant_share: float
    urgent: float


def sharing() -> Sharing:
    with Wan(LINE) as wan:
        first, second = (node_at(wan, "a", name, LAYOUT, POOL_BYTES) for name in ("first", "second"))
        target = node_at(wan, "b", "target", LAYOUT, POOL_BYTES)
        with Driver(first, second, target) as driver:
            pace(first, wan)
            return Sharing(
                even=_even(driver, first, first, target),
                tenant_share=_tenants(driver, first, target),
                urgent=_urgent(driver, first, target),
                even_pumps=_even_pumps(wan, driver, first, second, target),
            )


def _even_pumps(wan: Wan, driver: Driver, first: Node, second: Node, target: Node) -> float:
    for node in (first, second):
        pace(node, wan, share=0.5)
    return _even(driver, first, second, target)


def _even(driver: Driver, first: Node, second: Node, target: Node) -> float:
    """Two transfers that begin together. While both run they have the line; what the slower had by the time that the
    other ended follows from when it ended itself."""
    ratios = []
    for _ in range(_RUNS + 1):
        sooner, later = sorted(_race(driver, [bulk(source, target) for source in (first, second)]))
        ratios.append(1 / max(0.01, 2 * sooner / later - 1))
    return statistics.median(ratios[1:])


def _race(driver: Driver, transfers: list[Transfer]) -> list[float]:
    """They begin together; how long each one takes."""
    began = time.monotonic()
    for transfer in transfers:
        driver.begin(transfer)
    driver.run_until(partial(_over, transfers), limit_s=30)
    return [transfer.received_at - began for transfer in transfers if transfer.received_at is not None]


def _over(transfers: list[Transfer]) -> bool:
    return all(transfer.is_over for transfer in transfers)


def _tenants(driver: Driver, source: Node, target: Node) -> float:
    """Each has as much to send as its weight says, so that with the right shares they end together. What the one that
    ends first had of the line follows from when both did."""
    shares = []
    for _ in range(_RUNS):
        pair = [
            bulk(source, target, tokens=int(TOKENS * weight), tenant=f"of weight {weight}", weight=weight)
            for weight in WEIGHTS
        ]
        heavy_s, light_s = _race(driver, pair)
        heavy, light = (transfer.nbytes for transfer in pair)
        line_bytes_per_s = (heavy + light) / max(heavy_s, light_s)
        share = heavy / heavy_s / line_bytes_per_s if heavy_s < light_s else 1 - light / light_s / line_bytes_per_s
        shares.append(share * sum(WEIGHTS) / WEIGHTS[0])
    return statistics.median(shares)


def _urgent(driver: Driver, source: Node, target: Node) -> float:
    def ping(flows: list[Flow]) -> float:
        transfer = bulk(source, target, tokens=_SMALL_TOKENS, urgency=_URGENT)
        driver.begin(transfer)
        run_flows(driver, flows, lambda: transfer.is_over)
        assert transfer.received_at is not None
        return transfer.received_at - transfer.began_at

    alone = statistics.median(ping([]) for _ in range(_PINGS))
    flow = Flow(driver, partial(bulk, source, target))
    flow.start()
    warm_at = time.monotonic() + _WARM_S
    run_flows(driver, [flow], lambda: time.monotonic() >= warm_at)
    beneath = statistics.median(ping([flow]) for _ in range(_PINGS))
    drain(driver, [flow])
    return beneath / alone
