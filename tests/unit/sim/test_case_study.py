"""The planner reproduces the paper's case study."""

import pytest

from prfaas.scheduling.planner import Roles
from prfaas.scheduling.throughput import Approximation
from prfaas.sim.case_study import (
    HOMOGENEOUS,
    NARROW_LINKS_GBPS,
    PRFAAS_PD,
    STEP_LIMIT_S,
    case_study_plan,
    link_of,
    naive_throughput,
    planner_figures,
    token_gaps,
)

FIGURES = planner_figures()
WITHIN = 0.03
#: Lambda_max by link, in Gbps and requests/s.
NARROW = {10: 3.07, 8: 2.66, 6: 2.34, 4: 2.08, 2: 1.64}


@pytest.mark.parametrize("approximation", Approximation)
def test_prfaas_pd_is_the_papers(approximation: Approximation) -> None:
    """t of 19 to 20 thousand tokens, three PD nodes for prefill and five for decode, stages 1.61, 1.64 and 3.91."""
    found = case_study_plan(PRFAAS_PD, Roles.WHOLE, approximation)
    rates = found.throughput
    assert 19_000 <= found.threshold_tokens <= 20_000
    assert (found.n_p, found.n_d) == (3, 5)
    assert (rates.theta_prfaas, rates.theta_pdp, rates.theta_pdd) == pytest.approx((1.61, 1.64, 3.91), rel=WITHIN)
    assert rates.lambda_max == pytest.approx(3.24, rel=WITHIN)
    assert rates.costs.offloaded_share == pytest.approx(0.496, abs=0.01)
    assert rates.egress_bytes_per_s * 8e-9 == pytest.approx(13, abs=1)


@pytest.mark.parametrize("approximation", Approximation)
def test_the_baselines_are_the_papers(approximation: Approximation) -> None:
    """12 H20 instances as 9 and 3: 2.11 requests/s. All prefill sent away: 2.45."""
    homogeneous = case_study_plan(HOMOGENEOUS, Roles.WHOLE, approximation)
    assert (homogeneous.n_p, homogeneous.n_d) == (9, 3)
    assert homogeneous.throughput.lambda_max == pytest.approx(2.11, rel=WITHIN)
    assert homogeneous.throughput.theta_pdd == pytest.approx(2.35, rel=WITHIN)
    assert naive_throughput(approximation).lambda_max == pytest.approx(2.45, rel=WITHIN)
    assert naive_throughput(approximation).theta_pdd == pytest.approx(6.25)


@pytest.mark.parametrize("approximation", Approximation)
@pytest.mark.parametrize("gbps", NARROW_LINKS_GBPS)
def test_a_narrow_link_raises_the_threshold_and_lowers_the_limit(gbps: int, approximation: Approximation) -> None:
    """It binds below 12 Gbps."""
    found = case_study_plan(link_of(gbps), Roles.WHOLE, approximation)
    assert found.throughput.lambda_max == pytest.approx(NARROW[gbps], rel=WITHIN)
    assert found.throughput.egress_bytes_per_s * 8e-9 <= gbps * (1 + 1e-9)


def test_the_threshold_rises_as_the_link_narrows() -> None:
    """Less and less is worth sending."""
    thresholds = [FIGURES["links"][str(gbps)]["t"] for gbps in NARROW_LINKS_GBPS]
    assert thresholds == sorted(thresholds)  # type: ignore[type-var]
    assert thresholds == pytest.approx([25_700, 29_000, 38_000, 48_000, 66_000], rel=0.05)


def test_a_shared_node_closes_most_of_the_gap_that_whole_roles_leave() -> None:
    """3.30 requests/s or more with 40 tokens/s for each; without that limit it would be about 3.36."""
    mixed, whole = FIGURES["planner"]["mixed"], FIGURES["planner"]["prfaas_pd"]
    assert mixed["lambda_max"] >= 3.30  # type: ignore[operator]
    assert mixed["unlimited_lambda_max"] == pytest.approx(3.36, rel=WITHIN)
    assert whole["lambda_max"] < mixed["lambda_max"] < mixed["unlimited_lambda_max"]  # type: ignore[operator]
    assert mixed["lambda_max"] >= 1.56 * FIGURES["planner"]["homogeneous"]["lambda_max"]  # type: ignore[operator]


def test_gaps_between_tokens_average_to_the_limit_and_the_longest_hold_a_chunk_of_prefill() -> None:
    """On a shared node a request gets 40 tokens/s in the mean: short gaps, and now and then one with a chunk in it."""
    found = case_study_plan(PRFAAS_PD, Roles.MIXED)
    gaps = token_gaps(PRFAAS_PD, found)
    assert sum(share for _, share in gaps.gaps) == pytest.approx(1)
    assert sum(seconds * share for seconds, share in gaps.gaps) == pytest.approx(STEP_LIMIT_S)
    assert found.mixed is not None
    (bare_s, often), _, (with_chunk_s, seldom) = gaps.gaps
    on_shared_node = (bare_s * often + with_chunk_s * seldom) / (often + seldom)
    assert on_shared_node == pytest.approx(STEP_LIMIT_S)
    assert gaps.quantile(0.5) == pytest.approx(STEP_LIMIT_S)
    assert gaps.quantile(0.01) == bare_s < STEP_LIMIT_S < with_chunk_s == gaps.quantile(0.999)


def test_whole_roles_give_even_gaps() -> None:
    """A node that only decodes makes one full step after another."""
    found = case_study_plan(PRFAAS_PD, Roles.WHOLE)

    assert [share for _, share in token_gaps(PRFAAS_PD, found).gaps] == [1.0]
    assert token_gaps(PRFAAS_PD, found).quantile(0.99) == pytest.approx(STEP_LIMIT_S)


def test_the_figures_have_the_keys_that_are_promised() -> None:
    """Those who read the JSON rely on them."""
    keys = {"t", "n_p", "n_d", "theta_prfaas", "theta_pdp", "theta_pdd", "lambda_max", "egress_gbps"}
    assert set(FIGURES) == {"planner", "links"}
    assert set(FIGURES["planner"]) == {"prfaas_pd", "homogeneous", "naive", "mixed"}
    for name, figures in FIGURES["planner"].items():
        assert keys <= set(figures), name
    assert list(FIGURES["links"]) == ["10", "8", "6", "4", "2"]
    assert all(set(figures) == {"lambda_max", "t"} for figures in FIGURES["links"].values())
    assert (FIGURES["planner"]["naive"]["t"], FIGURES["planner"]["naive"]["n_p"]) == (0, 0)
