"""`prfaas bench`: the load is open, and figures are those of the times that requests were due."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.trace_files import Traced
from prfaas.sim.workload import Fixed, LogNormal
from services.bench.drive import Driven, Outcome
from services.bench.figures import Slo, figures, highest, next_rate
from services.bench.load import Api, Asking, Bounds, Drawn, Planned, Replayed, planned, window_s

BOUNDS = Bounds(warm_up_s=1.0, duration_s=10.0, requests=None, max_context_tokens=100_000)
SLO = Slo(ttft_s=0.5, itl_s=0.05, share=0.9)
DRAWN = Drawn(prompts=LogNormal(), outputs=Fixed(tokens=8), cv=1.0)
ASKING = Asking(model="m", api=Api.TOKENS, seed=1, low_token=3, high_token=9, ignore_eos=False)


def answered(
    at_s: float, ttft_s: float, *, sent_s: float | None = None, tokens: int = 3, gap_s: float = 0.01
) -> Outcome:
    first_s = at_s + ttft_s
    last_s = first_s + gap_s * (tokens - 1)
    outcome = Outcome(Planned(0, at_s, 10, tokens), at_s if sent_s is None else sent_s, first_s, last_s)
    outcome.gaps_s, outcome.output_tokens = [gap_s] * (tokens - 1), tokens
    return outcome


def told(*outcomes: Outcome, cpu_s: float = 1.0) -> dict[str, object]:
    run = Driven(list(outcomes), elapsed_s=11.0, cpu_s=cpu_s, lags_s=[0.001])
    return figures(run, 1.0, BOUNDS, SLO, 10.0)


def test_a_late_send_counts_for_the_request():
    """Due at 2 s, sent at 5 s, answered at 5.1 s: 3.1 s to the first token, and the generator is named."""
    found = told(answered(2.0, 3.1, sent_s=5.0))
    assert found["ttft_seconds"]["p50"] == pytest.approx(3.1)
    assert found["generator"]["was_bottleneck"] and "late" in found["generator"]["why"][0]


def test_a_busy_generator_says_so():
    assert not told(answered(2.0, 0.1))["generator"]["was_bottleneck"]
    assert told(answered(2.0, 0.1), cpu_s=10.0)["generator"]["was_bottleneck"]


def test_warm_up_is_sent_and_not_measured():
    found = told(answered(0.5, 9.0), answered(2.0, 0.1))
    assert (found["warm_up_requests"], found["sent"]) == (1, 1)
    assert found["ttft_seconds"]["max"] == pytest.approx(0.1)


def test_goodput_is_what_came_whole_and_within_both_bounds():
    failed = Outcome(Planned(0, 3.0, 10, 3), 3.0, failed="503")
    found = told(answered(2.0, 0.1), answered(2.0, 0.6), answered(2.0, 0.1, gap_s=0.06), failed)
    assert (found["good"], found["completed"], found["failed"]) == (1, 3, {"503": 1})
    assert found["good_share"] == 0.25 and not found["meets_slo"]
    assert found["goodput_per_s"] == pytest.approx(0.1)


def test_a_server_that_falls_behind_has_not_the_offered_throughput():
    """All is served, in twice the time in which it was sent."""
    found = told(*(answered(1.0 + n, 1.1 * n + 0.1, tokens=1) for n in range(10)))
    assert found["offered_per_s"] == 1.0
    assert found["throughput_per_s"] == pytest.approx(10 / 19, rel=0.01)


def test_equal_seeds_make_equal_loads_and_a_rate_only_stretches_time():
    """So that two rates are compared on the same requests."""
    slow, fast = (planned(DRAWN, rate, BOUNDS, seed=3) for rate in (2.0, 4.0))
    assert slow == planned(DRAWN, 2.0, BOUNDS, seed=3)
    assert [each.prompt_tokens for each in fast][: len(slow)] == [each.prompt_tokens for each in slow]
    assert fast[5].at_s == pytest.approx(slow[5].at_s / 2)
    assert ASKING.body(slow[0]) == ASKING.body(fast[0]) != ASKING.body(slow[1])


def test_a_trace_is_stretched_to_the_rate_and_keeps_its_prefixes():
    trace = Replayed((Traced(0.0, 20, 2, (1, 2)), Traced(10.0, 20, 2, (1, 3)), Traced(20.0, 20, 2, (7, 8))), 8)
    requests = planned(trace, 1.0, BOUNDS, seed=1)
    assert [each.at_s for each in requests] == [0.0, 1.0, 2.0]
    units = range(1000)
    first, second, third = (ASKING._prompt(each, units) for each in requests)
    assert first[:8] == second[:8] and first[8:] != second[8:] and first[:8] != third[:8]
    assert [len(each) for each in (first, second, third)] == [20, 20, 20]


def test_the_window_ends_with_the_trace_or_the_number_of_requests():
    """A rate is not diluted by time in which nothing was to be sent."""
    trace = Replayed(tuple(Traced(float(n), 20, 2) for n in range(21)), 0)
    bounds = Bounds(warm_up_s=0.0, duration_s=100.0, requests=None, max_context_tokens=100)
    requests = planned(trace, 10.0, bounds, seed=1)
    assert len(requests) / window_s(requests, trace, bounds) == pytest.approx(10, rel=0.06)
    few = Bounds(warm_up_s=0.0, duration_s=100.0, requests=200, max_context_tokens=100_000)
    drawn = planned(DRAWN, 10.0, few, seed=1)
    assert len(drawn) == 200 and len(drawn) / window_s(drawn, DRAWN, few) == pytest.approx(10, rel=0.25)
    assert window_s(planned(DRAWN, 10.0, BOUNDS, seed=1), DRAWN, BOUNDS) == BOUNDS.duration_s


@given(limit=st.floats(0.1, 1000), start=st.floats(0.1, 1000))
def test_the_search_closes_in_on_the_limit(limit: float, start: float):
    """Wherever it starts, unless that is far too high; always in few runs."""
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, start, 0.1)) is not None:
        tried.append((rate, rate <= limit))
        assert len(tried) < 24
    found = highest(tried)
    if found is None:
        assert limit < start / 32
    else:
        assert found <= limit <= found * 1.1 * (1 + 1e-9)


def test_luck_above_a_rate_that_failed_does_not_count():
    assert highest([(1.0, True), (2.0, False), (4.0, True)]) == 1.0
    assert next_rate([(1.0, True), (2.0, False), (4.0, True)], 1.0, 0.1) == pytest.approx(math.sqrt(2))
