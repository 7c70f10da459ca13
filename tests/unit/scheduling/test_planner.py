"""The search for t and roles, against trying everything."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.histogram import LengthHistogram
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import SHARING_GAIN, RolePlan, Roles, plan
from prfaas.scheduling.throughput import Approximation, Binding, CostModel, Fleet, evaluate, throughput
from tests.unit.scheduling.cut_lengths import lengths_of

FLEET = Fleet(
    n_prfaas=4,
    n_pd=8,
    prfaas=shipped(CASE_STUDY, "h200"),
    pd=shipped(CASE_STUDY, "h20"),
    link_bytes_per_s=100 * GBPS,
    output_tokens=1024,
    step_limit_s=0.025,
)
LENGTHS = Lengths.log_normal(9.90, 1.00, 128, 131_072)
FEW = lengths_of([300, 2000, 2000, 9000, 40_000, 90_000])


def planned(
    fleet: Fleet,
    lengths: Lengths = LENGTHS,
    roles: Roles = Roles.WHOLE,
    approximation: Approximation = Approximation.INTEGRAL,
) -> RolePlan:
    found = plan(fleet, lengths, roles, approximation)
    assert isinstance(found, RolePlan)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), st.floats(0.1, 200), st.integers(20, 4000), st.sampled_from(Approximation))
def test_no_threshold_and_no_roles_do_better(
    n_prfaas: int, n_pd: int, gbps: float, output_tokens: int, approximation: Approximation
) -> None:
    """For any node counts, link and output length, trying every length and every whole-node split finds no more."""
    fleet = replace(FLEET, n_prfaas=n_prfaas, n_pd=n_pd, link_bytes_per_s=gbps * GBPS, output_tokens=output_tokens)
    found = planned(fleet, FEW, approximation=approximation)
    model = CostModel.of(fleet, FEW, approximation)
    best = max(
        throughput(fleet, model.at(t), n_p, n_pd - n_p).lambda_max
        for t, n_p in itertools.product((0, *FEW.highs), range(n_pd))
    )
    assert found.throughput.lambda_max == pytest.approx(best, rel=1e-6)
    assert found.n_p + found.n_d == n_pd and found.mixed is None


@pytest.mark.parametrize("approximation", Approximation)
@pytest.mark.parametrize("gbps", [100, 10, 4])
def test_a_finer_search_of_a_smooth_distribution_finds_no_more(approximation: Approximation, gbps: float) -> None:
    """Two refinements of a coarse grid come within a thousandth of every threshold at once."""
    fleet = replace(FLEET, link_bytes_per_s=gbps * GBPS)
    model = CostModel.of(fleet, LENGTHS, approximation)
    best = max(
        throughput(fleet, model.at(t), n_p, 8 - n_p).lambda_max for t in range(128, 131_072, 37) for n_p in range(8)
    )
    assert planned(fleet, approximation=approximation).throughput.lambda_max >= best * 0.999


def test_the_plan_says_what_evaluating_it_says() -> None:
    """The figures of a plan are those of its threshold and roles."""
    found = planned(FLEET)
    assert found.throughput == evaluate(
        FLEET, LENGTHS, found.threshold_tokens, found.n_p, found.n_d, Approximation.INTEGRAL
    )


def test_where_decode_is_the_limit_the_threshold_balances_the_two_ways_of_prefill() -> None:
    """Equation 7 chooses among thresholds that are equally good."""
    found = planned(replace(FLEET, link_bytes_per_s=6 * GBPS))
    rates, p = found.throughput, found.throughput.costs.offloaded_share
    assert rates.binding is Binding.PD_DECODE
    assert rates.theta_prfaas / p == pytest.approx(rates.theta_pdp / (1 - p), rel=0.01)
    assert rates.theta_prfaas / p > 1.02 * rates.lambda_max


def test_without_prfaas_nothing_crosses() -> None:
    """The threshold is the longest length there is, and nodes divide between the two stages at home."""
    found = planned(replace(FLEET, n_prfaas=0, n_pd=12))
    assert (found.threshold_tokens, found.n_p, found.n_d) == (131_072, 9, 3)
    dead = planned(replace(FLEET, link_bytes_per_s=0.0))
    assert (dead.threshold_tokens, dead.throughput.egress_bytes_per_s) == (131_072, 0)


def test_with_far_more_prfaas_than_needed_no_pd_node_prefills() -> None:
    """Then everything crosses."""
    found = planned(replace(FLEET, n_prfaas=40))
    assert (found.threshold_tokens, found.n_p, found.n_d) == (0, 0, 8)


def test_a_single_pd_node_shares_its_time_when_nobody_else_prefills() -> None:
    """With whole roles it could only do one of two things, and serve nothing."""
    alone = replace(FLEET, n_prfaas=0, n_pd=1)
    assert planned(alone).throughput.lambda_max == 0
    found = planned(alone, roles=Roles.MIXED)
    assert found.mixed is not None and (found.n_p, found.n_d) == (0, 0)
    assert found.throughput.lambda_max > 0.1


def test_a_shared_node_keeps_every_step_within_the_limit() -> None:
    """What its share of prefill leaves is enough for a step of its batch, on any fleet."""
    for n_pd, n_prfaas in itertools.product(range(1, 12), range(7)):
        fleet = replace(FLEET, n_pd=n_pd, n_prfaas=n_prfaas)
        found, whole = planned(fleet, roles=Roles.MIXED), planned(fleet)
        assert found.n_p + found.n_d + (found.mixed is not None) == n_pd
        if found.mixed is not None:
            step_s = fleet.decode.step_s(found.mixed.decode_batch)
            assert step_s / (1 - found.mixed.prefill_share) <= 0.025 * (1 + 1e-9)
            assert found.throughput.lambda_max > whole.throughput.lambda_max * (1 + SHARING_GAIN)
        else:
            assert found == whole


def test_a_large_fleet_has_no_use_for_shared_nodes() -> None:
    """With many nodes whole roles are fine enough."""
    large = replace(FLEET, n_prfaas=200, n_pd=400, link_bytes_per_s=None)
    assert planned(large, roles=Roles.MIXED).mixed is None


@pytest.mark.parametrize(
    ("fleet", "lengths", "what"),
    [
        (replace(FLEET, n_pd=0), LENGTHS, "PD nodes"),
        (replace(FLEET, link_bytes_per_s=math.nan), LENGTHS, "link rates"),
        (replace(FLEET, link_bytes_per_s=-1.0), LENGTHS, "link rates"),
        (FLEET, LengthHistogram(60.0).counts(0.0).lengths(needed=50), "requests"),
    ],
)
def test_field_K4_what_is_not_known_gives_no_plan(fleet: Fleet, lengths: Lengths | InsufficientData, what: str) -> None:
    """No nodes, no link measured, no requests seen: the answer says so, and what is in force stays."""
    found = plan(fleet, lengths, Roles.MIXED, Approximation.INTEGRAL)
    assert isinstance(found, InsufficientData)
    assert found.what == what


def test_one_length_only_goes_one_way() -> None:
    """All requests are alike, so all are prefilled on the better side."""
    found = planned(FLEET, lengths_of([50_000]))
    assert found.throughput.costs.offloaded_share in (0, 1)
    assert found.throughput.lambda_max > 0


def test_an_online_histogram_plans_like_the_distribution_it_saw() -> None:
    """Within 2 %, from the lengths of an hour."""
    chance, histogram = random.Random(1), LengthHistogram(1e9)
    for second in range(10_000):
        histogram.observe(round(LENGTHS.quantile(chance.random())), second)
    seen = histogram.counts(10_000).lengths(needed=100)
    assert isinstance(seen, Lengths)
    found, truth = planned(FLEET, seen), planned(FLEET)
    assert (found.n_p, found.n_d) == (truth.n_p, truth.n_d)
    assert found.throughput.lambda_max == pytest.approx(truth.throughput.lambda_max, rel=0.02)
    assert found.threshold_tokens == pytest.approx(truth.threshold_tokens, rel=0.05)
