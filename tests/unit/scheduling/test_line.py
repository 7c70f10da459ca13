"""What a link is planned with: a narrow one is remembered between two queues, a bad moment is not."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import LinkState
from prfaas.profile import GBPS
from prfaas.scheduling.line import LineMemory
from tests.unit.scheduling.steering_scenes import link

MEMORY_S, NEEDED = 150.0, 15
WIDE = link(100)


def pressed(gbps: float) -> LinkState:
    return link(gbps, queued_bytes=math.ceil(2 * gbps * GBPS))


def seen(*states: LinkState | None) -> tuple[LineMemory, float]:
    """One report per second."""
    memory = LineMemory(MEMORY_S, NEEDED)
    for second, state in enumerate(states):
        memory.see(state, float(second))
        memory.check()
    return memory, float(len(states))


def capacity_gbps(memory: LineMemory, now: LinkState = WIDE) -> float | None:
    believed = memory.believed(now)
    assert believed is not None
    return None if believed.capacity_bytes_per_s is None else believed.capacity_bytes_per_s / GBPS


def test_a_narrow_link_is_remembered_between_two_queues():
    """And forgotten some minutes after the last of them."""
    memory, now = seen(*[WIDE] * 10, *[pressed(3)] * 20, *[WIDE] * 140)
    assert capacity_gbps(memory) == 3
    for second in range(20):
        memory.see(WIDE, now + second)
    assert capacity_gbps(memory) == 100


def test_queues_that_are_far_between_add_up():
    """A line that is pressed for a few seconds of every minute is a narrow line."""
    memory, _ = seen(*[WIDE] * 10, *[*[pressed(3)] * 4, *[WIDE] * 56] * 4)
    assert capacity_gbps(memory) == 3


def test_a_bad_moment_of_a_wide_link_is_none_of_the_plans_business():
    """Not while it lasts either."""
    memory, _ = seen(*[WIDE] * 10, *[pressed(1)] * (NEEDED - 1))
    assert capacity_gbps(memory, pressed(1)) == 100
    memory.see(pressed(1), 30.0)
    assert capacity_gbps(memory, pressed(1)) == 1


def test_one_estimate_that_is_far_off_does_not_count():
    """A link is what it mostly was under its queue: on the way down it is overrated, and sometimes underrated."""
    memory, _ = seen(WIDE, *[pressed(gbps) for gbps in (60, 30, 12, 6)], *[pressed(3)] * 30, pressed(0.5))
    assert capacity_gbps(memory) == 3


def test_the_tail_of_a_transfer_is_no_queue():
    memory, _ = seen(*[link(10, queued_bytes=int(0.2 * 10 * GBPS))] * 60)
    assert capacity_gbps(memory) == 100


def test_a_link_that_carries_more_is_wider():
    """Whatever it was before."""
    memory, _ = seen(*[pressed(3)] * 20)
    assert capacity_gbps(memory, replace(WIDE, goodput_bytes_per_s=8 * GBPS)) == 8


def test_a_link_that_grows_without_losing_its_queue_is_followed():
    memory, _ = seen(*[pressed(3)] * 100, *[pressed(6)] * 100)
    assert capacity_gbps(memory, pressed(6)) == 6


def test_a_link_that_nothing_is_known_of_stays_so():
    """None at all, one that was built for the fleet, and one whose rate is no number."""
    memory, _ = seen(*[pressed(3)] * 20)
    assert memory.believed(None) is None
    assert math.isnan(capacity_gbps(memory, link(math.nan)) or 0.0)
    unknown, _ = seen(*[link(None)] * 5, *[link(math.nan)] * 5, None, *[pressed(3)] * 3)
    assert unknown.believed(link(None)) == link(None)
    assert capacity_gbps(LineMemory(MEMORY_S, NEEDED)) == 100


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0.1, 100), st.booleans()), max_size=60))
def test_the_plan_is_made_with_something_that_was_seen(reports: list[tuple[float, float, bool]]):
    """However reports come, the capacity is within those of the link."""
    memory, now = LineMemory(MEMORY_S, NEEDED), 0.0
    for elapsed_s, gbps, queue in reports:
        now += elapsed_s
        memory.see(pressed(gbps) if queue else link(gbps), now)
        memory.check()
    rates = [gbps for _, gbps, _ in reports] + [100.0]
    found = capacity_gbps(memory)
    assert found is not None and min(rates) <= found * (1 + 1e-9) and found <= max(rates) * (1 + 1e-9)
