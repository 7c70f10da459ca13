"""How busy nodes were between two rounds: means of noisy reports, over minutes in which nothing else changed."""

import math
import random
from dataclasses import replace

import pytest

from prfaas.cluster import Node, NodeLoad, Role
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.histogram import BUCKETS, LengthCounts
from prfaas.scheduling.watch import Watch
from tests.unit.scheduling.steering_scenes import node

MEMORY_S = 600.0


def watching() -> Watch:
    return Watch(MEMORY_S)


def busy(prefill: float | None, decode: float | None = 0.5, queued: int = 0) -> Node:
    load = NodeLoad(prefill_busy_ratio=prefill, decode_busy_ratio=decode, queued_prefill_tokens=queued)
    return node("pd0", Role.PREFILL, load=load)


def asked(per_s: float, requests: float = 500.0) -> DemandSnapshot:
    """Of one length, as lengths do not matter here."""
    return DemandSnapshot(counts=LengthCounts((requests, *[0.0] * (BUCKETS - 1))), arrivals_per_s=per_s)


def test_a_noisy_second_counts_as_one_second():
    """A node that is busy in 7 of 10 seconds is 70 % busy, whatever the last report says."""
    watch, chance = watching(), random.Random(1)
    for second in range(600):
        watch.see(
            [busy(float(chance.random() < 0.7), queued=chance.randrange(2000))], 19_000, asked(2.0), float(second)
        )
    mean = watch.averaged(busy(0.0)).load
    assert mean.prefill_busy_ratio == pytest.approx(0.7, abs=0.05)
    assert mean.queued_prefill_tokens == pytest.approx(1000, rel=0.1)
    assert watch.arrivals_per_s == pytest.approx(2.0) and watch.seconds == 599


def test_another_threshold_or_other_roles_begin_anew():
    """What was seen under the ones before says nothing about these."""
    watch = watching()
    for second in range(300):
        watch.see([busy(1.0)], 19_000, asked(2.0), float(second))
    for changed_node, threshold in ((busy(0.2), 25_000), (replace(busy(0.2), role=Role.DECODE), 25_000)):
        watch.see([changed_node], threshold, asked(2.0), 300.0)
        assert watch.seconds == 0 and watch.averaged(changed_node).load.prefill_busy_ratio is None
        watch.see([changed_node], threshold, asked(2.0), 301.0)
        assert watch.averaged(changed_node).load.prefill_busy_ratio == pytest.approx(0.2)


def test_where_nobody_looked_a_node_is_as_it_reports():
    watch = watching()
    assert watch.seconds is None and watch.averaged(busy(0.9)) == busy(0.9)


def test_what_is_not_a_number_is_not_seen():
    """Neither a busy ratio nor arrivals."""
    watch = watching()
    for second in range(10):
        watch.see([busy(math.nan if second % 2 else 0.4)], 1, asked(math.nan if second % 2 else 3.0), float(second))
    assert watch.averaged(busy(None)).load.prefill_busy_ratio == pytest.approx(0.4)
    assert watch.arrivals_per_s == pytest.approx(3.0)


def test_another_kind_of_traffic_begins_anew():
    """The demand has just forgotten most of what came before. That counts fade is not that."""
    watch, requests = watching(), 1000.0
    for second in range(300):
        requests *= 0.998
        watch.see([busy(1.0)], 19_000, asked(2.0, requests), float(second))
    assert watch.seconds == 299
    watch.see([busy(0.2)], 19_000, asked(2.0, 150.0), 300.0)
    assert watch.seconds == 0 and watch.averaged(busy(0.2)).load.prefill_busy_ratio is None
