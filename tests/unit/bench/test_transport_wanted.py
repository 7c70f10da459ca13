"""The transfer benchmark's check names exactly the figures that are not what they must be."""

from dataclasses import replace

import pytest

from bench.transport.layerwise import Exposed
from bench.transport.line import LineShare
from bench.transport.rate import Rate
from bench.transport.results import Results
from bench.transport.sharing import Sharing
from bench.transport.wanted import misses

GOOD = Results(
    loopback={
        "iperf3": Rate(6.0, 0.2),
        "c_loop": Rate(7.0, 0.3),
        "ours": Rate(5.0, 0.4),
        "ours_aes": Rate(3.4, 0.7),
        "ours_busy_engine": Rate(2.3, 0.4),
        "ours_busy_elsewhere": Rate(2.4, 0.4),
        "mooncake": Rate(1.2, 1.2),
        "nixl": Rate(0.9, 1.5),
    },
    wan=[
        LineShare(mbit=1000, rtt_ms=30, loss=0.001, line_ratio=0.94, retrans_ratio=0.001),
        LineShare(mbit=1000, rtt_ms=80, loss=0.001, line_ratio=0.5, retrans_ratio=0.02),
    ],
    layerwise=[
        Exposed(rtt_ms=30, warm=False, exposed_s=0.38, state_s=0.285),
        Exposed(rtt_ms=80, warm=False, exposed_s=0.9, state_s=0.285),
        Exposed(rtt_ms=80, warm=True, exposed_s=0.43, state_s=0.285),
    ],
    sharing=Sharing(even=1.1, even_pumps=1.1, tenant_share=0.98, urgent=2.5),
)


def with_rate(name: str, rate: Rate) -> Results:
    assert GOOD.loopback is not None
    return replace(GOOD, loopback=GOOD.loopback | {name: rate})


def with_sharing(**changes: float) -> Results:
    assert GOOD.sharing is not None
    return replace(GOOD, sharing=replace(GOOD.sharing, **changes))


def test_figures_as_they_must_be_are_not_missed() -> None:
    assert list(misses(GOOD)) == []


@pytest.mark.parametrize(
    ("results", "named"),
    [
        (with_rate("ours", Rate(4.7, 0.4)), "iperf3"),
        (with_rate("ours", Rate(5.0, 0.5)), "CPU"),
        (with_rate("ours_aes", Rate(3.2, 0.7)), "ours_aes"),
        (with_rate("mooncake", Rate(2.6, 0.7)), "mooncake"),
        (with_rate("nixl", Rate(2.6, 0.7)), "nixl"),
        (with_rate("ours_busy_engine", Rate(2.1, 0.4)), "busy"),
        (replace(GOOD, wan=[LineShare(mbit=1000, rtt_ms=30, loss=0.001, line_ratio=0.9, retrans_ratio=0)]), "line"),
        (replace(GOOD, wan=[LineShare(mbit=1000, rtt_ms=30, loss=0.001, line_ratio=1, retrans_ratio=0.01)]), "again"),
        (replace(GOOD, layerwise=[Exposed(rtt_ms=30, warm=True, exposed_s=0.4, state_s=0.285)]), "30 ms, warm"),
        (replace(GOOD, layerwise=[Exposed(rtt_ms=80, warm=True, exposed_s=0.45, state_s=0.285)]), "80 ms, warm"),
        (with_sharing(even=1.3), "one worker"),
        (with_sharing(even_pumps=1.3), "two workers"),
        (with_sharing(tenant_share=1.06), "tenant"),
        (with_sharing(tenant_share=0.94), "tenant"),
        (with_sharing(urgent=3.5), "urgent"),
    ],
)
def test_each_miss_is_named(results: Results, named: str) -> None:
    """One figure is off: one line, which says which."""
    (miss,) = misses(results)
    assert named in miss


def test_what_was_not_measured_is_not_missed() -> None:
    """A part that was not run, and a candidate that cannot be had here."""
    assert list(misses(Results())) == []
    assert GOOD.loopback is not None
    without = {name: rate for name, rate in GOOD.loopback.items() if name not in ("iperf3", "mooncake", "nixl")}
    assert list(misses(replace(GOOD, loopback=without))) == []
