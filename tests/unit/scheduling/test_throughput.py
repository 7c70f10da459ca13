"""Equations 1 to 8 on fleets small enough to compute by hand."""

import math
from dataclasses import replace

import pytest

from prfaas.curve import Curve
from prfaas.profile import DecodeProfile, Profile
from prfaas.scheduling.throughput import Approximation, Binding, Fleet, Throughput, egress_needed_bytes_per_s, evaluate
from tests.unit.scheduling.cut_lengths import lengths_of

#: One second per 1000 tokens far away, two at home; 1 MB of state and 1 MB per 1000 tokens.
FAR = Profile("far", "m", Curve.through([(1000, 1), (2000, 2)], from_zero=True), Curve.through([(0, 1e6), (1000, 2e6)]))
NEAR = replace(
    FAR,
    hardware="near",
    prefill=Curve.through([(1000, 2), (2000, 4)], from_zero=True),
    decode=DecodeProfile(base_s=0.010, per_sequence_s=0.001, max_batch=10),
)
FLEET = Fleet(n_prfaas=2, n_pd=5, prfaas=FAR, pd=NEAR, link_bytes_per_s=1e9, output_tokens=100, step_limit_s=0.020)
#: Three of four requests are short.
LENGTHS = lengths_of([1000, 1000, 1000, 4000])


def at(fleet: Fleet, t: float, n_p: float, n_d: float, approximation: Approximation = Approximation.MEAN) -> Throughput:
    return evaluate(fleet, LENGTHS, t, n_p, n_d, approximation)


def test_every_stage_by_hand() -> None:
    """4000 tokens take 4 s on each of 2 instances; 1000 take 2 s on each of 3; 10 sequences make 100 tokens in 2 s."""
    rates = at(FLEET, 1000, 3, 2)
    assert rates.theta_prfaas == pytest.approx(0.5)
    assert rates.theta_pdp == pytest.approx(1.5)
    assert rates.theta_pdd == pytest.approx(10.0)
    assert rates.lambda_max == pytest.approx(2.0)
    assert rates.egress_bytes_per_s == pytest.approx(0.25 * 2.0 * 5e6)
    assert rates.costs.offloaded_share == 0.25


@pytest.mark.parametrize(
    ("fleet", "n_p", "n_d", "binding", "lambda_max"),
    [
        (FLEET, 3.5, 1.5, Binding.PRFAAS, 2.0),
        (replace(FLEET, link_bytes_per_s=1e6), 3.5, 1.5, Binding.LINK, 0.2 / 0.25),
        (FLEET, 1, 4, Binding.PD_PREFILL, 0.5 / 0.75),
        (FLEET, 4.9, 0.1, Binding.PD_DECODE, 0.5),
    ],
)
def test_the_fullest_stage_is_the_limit_and_is_named(
    fleet: Fleet, n_p: float, n_d: float, binding: Binding, lambda_max: float
) -> None:
    """Equation 6."""
    rates = at(fleet, 1000, n_p, n_d)
    assert rates.binding is binding
    assert rates.lambda_max == pytest.approx(lambda_max)


def test_a_link_built_for_the_fleet_never_binds() -> None:
    """Equation 2: so many busy instances put N * Phi on it, and it carries that."""
    built = replace(FLEET, link_bytes_per_s=None)
    assert at(built, 1000, 5, 1).lambda_max == at(FLEET, 1000, 5, 1).lambda_max
    needed = egress_needed_bytes_per_s(FAR, 2, 4000)
    assert needed == pytest.approx(2 * 5e6 / 4)
    assert at(replace(FLEET, link_bytes_per_s=needed), 1000, 5, 1).lambda_max == pytest.approx(2.0)
    assert at(replace(FLEET, link_bytes_per_s=0.99 * needed), 1000, 5, 1).binding is Binding.LINK


def test_a_stage_without_requests_does_not_bind() -> None:
    """All cross, or none do: then neither the nodes at home nor those away are missed."""
    everything, nothing = at(FLEET, 0, 0, 5), at(replace(FLEET, n_prfaas=0), 4000, 4, 1)
    assert (everything.theta_pdp, everything.costs.offloaded_share) == (0, 1)
    assert everything.lambda_max == pytest.approx(2 / 1.75)
    assert (nothing.theta_prfaas, nothing.costs.offloaded_share, nothing.egress_bytes_per_s) == (0, 0, 0)
    assert nothing.lambda_max == pytest.approx(4 / 3.5)


def test_requests_with_nowhere_to_go_make_the_limit_zero() -> None:
    """Long ones without PrfaaS instances, short ones without a prefill node, any without decode or with a dead link."""
    assert at(replace(FLEET, n_prfaas=0), 1000, 3, 2).lambda_max == 0
    assert at(FLEET, 1000, 0, 5).lambda_max == 0
    assert at(FLEET, 1000, 5, 0).lambda_max == 0
    assert at(replace(FLEET, link_bytes_per_s=0), 1000, 3, 2).lambda_max == 0


def test_the_mean_length_hides_what_long_prompts_cost() -> None:
    """With a convex T, the mean of the times exceeds the time of the mean."""
    convex = replace(FLEET, prfaas=replace(FAR, prefill=Curve.through([(1000, 1), (4000, 16)], from_zero=True)))
    mean = evaluate(convex, LENGTHS, 0, 0, 5, Approximation.MEAN)
    exact = evaluate(convex, LENGTHS, 0, 0, 5, Approximation.INTEGRAL)
    assert exact.costs.remote_s == pytest.approx((3 * 1 + 16) / 4)
    assert mean.costs.remote_s == pytest.approx(1 + 0.75 * 5)
    assert at(FLEET, 0, 0, 5).lambda_max == pytest.approx(at(FLEET, 0, 0, 5, Approximation.INTEGRAL).lambda_max)


def test_the_step_limit_sets_the_batch() -> None:
    """20 ms allow 10 sequences, 15 ms five; a limit that not even one meets is missed by one, not by all."""
    assert [replace(FLEET, step_limit_s=limit).decode_batch for limit in (0.020, 0.015, 0.005)] == [10, 5, 1]
    assert replace(FLEET, step_limit_s=0.015).decode_requests_per_s == pytest.approx(5 / (0.015 * 100))


@pytest.mark.parametrize(
    "nonsense",
    [{"n_prfaas": -1}, {"n_pd": -1}, {"output_tokens": 0}, {"step_limit_s": math.nan}, {"pd": FAR}],
)
def test_a_fleet_that_cannot_be_is_refused(nonsense: dict[str, object]) -> None:
    """Counts below zero, no output, no limit, a PD cluster that cannot decode."""
    with pytest.raises(ValueError, match=r"fleet|above 0|decode"):
        replace(FLEET, **nonsense)  # type: ignore[arg-type]
