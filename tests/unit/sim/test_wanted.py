"""Bounds that a reproduction has to keep."""

import copy
import math

import pytest

from prfaas.sim.wanted import LINKS_REQUESTS_PER_S, at_least, at_most, between, checks, near

PLANNED = {"t": 19_400, "n_p": 3, "n_d": 5, "theta_prfaas": 1.61, "theta_pdp": 1.64, "theta_pdd": 3.91}
SOUND = {
    "planner": {
        "prfaas_pd": {**PLANNED, "lambda_max": 3.24},
        "homogeneous": {"lambda_max": 2.11},
        "naive": {"lambda_max": 2.45},
        "mixed": {"lambda_max": 3.32},
    },
    "links": {gbps: {"lambda_max": rate} for gbps, rate in LINKS_REQUESTS_PER_S.items()},
    "simulated": {
        "sustained": {"prfaas_pd": 3.22, "homogeneous": 2.08, "naive": 2.43, "mixed": 3.30},
        "ttft": {
            rate: {"prfaas_pd": {"mean": 2.2, "p90": 3.5}, "homogeneous": {"mean": 4.4, "p90": 9.7}}
            for rate in ("0.5", "1.0", "1.5", "2.0")
        },
        "egress_gbps": 12.5,
        "slowest_tokens_per_s": 40.0,
    },
    "changing": {"burst": {"ttft_ratio": 1.05, "throughput_ratio": 1.0, "turns": 0}},
    "trace": {
        "prfaas": {"mean": 1.0, "p90": 2.0, "egress_gb": 900.0, "skip_rate": 0.30, "unfinished": 0},
        "always_remote": {"mean": 2.0, "p90": 4.0, "egress_gb": 1500.0, "skip_rate": 0.29, "unfinished": 0},
        "local_only": {"mean": 3.0, "p90": 9.0, "egress_gb": 0.0, "skip_rate": 0.25, "unfinished": 0},
        "fixed_t": {"mean": 300.0, "p90": 700.0, "egress_gb": 500.0, "skip_rate": 0.25, "unfinished": 800},
    },
}


def changed(path: str, value: object) -> dict[str, object]:
    """The sound figures with one of them replaced."""
    figures = copy.deepcopy(SOUND)
    *way, last = path.split("/")
    place = figures
    for key in way:
        place = place[key]
    assert last in place
    place[last] = value
    return figures


def test_figures_within_their_bounds_miss_nothing():
    """Also one that is exactly at its bound."""
    assert [check.item for check in checks(SOUND) if not check.ok] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("planner/prfaas_pd/t", 20_500),
        ("planner/prfaas_pd/n_p", 4),
        ("planner/prfaas_pd/lambda_max", 3.40),
        ("planner/mixed/lambda_max", 3.29),
        ("links/4/lambda_max", 2.20),
        ("simulated/sustained/homogeneous", 2.15),
        ("simulated/sustained/mixed", 3.00),
        ("simulated/ttft/1.5/prfaas_pd/mean", 2.5),
        ("simulated/ttft/0.5/prfaas_pd/p90", 4.0),
        ("simulated/egress_gbps", 14.0),
        ("simulated/egress_gbps", math.nan),
        ("simulated/slowest_tokens_per_s", 39.0),
        ("changing/burst/ttft_ratio", 1.2),
        ("changing/burst/ttft_ratio", math.nan),
        ("changing/burst/throughput_ratio", 0.8),
        ("changing/burst/turns", 1),
        ("trace/prfaas/mean", 2.1),
        ("trace/prfaas/egress_gb", 1600.0),
        ("trace/prfaas/skip_rate", 0.20),
    ],
)
def test_a_figure_out_of_its_bounds_is_found(path, value):
    """Whatever figure it is, and also when it is not a number."""
    assert any(check.missed for check in checks(changed(path, value)))


def egress(figures):
    return next(check for check in checks(figures) if check.item == "trace: egress over the best other")


def test_who_leaves_requests_waiting_has_not_sent_their_bytes():
    """Egress is compared with those that serve as many; and what never sends is no measure."""
    assert egress(SOUND).measured == pytest.approx(900 / 1500)


def test_who_sends_less_at_a_price_is_named_with_it():
    """However much longer its clients wait. It is not a miss, and it is not shown as a yes."""
    check = egress(changed("trace/fixed_t/unfinished", 0))
    assert check.measured == pytest.approx(900 / 500) and not check.ok and not check.missed
    assert check.verdict.startswith("not best: fixed_t sends 500 GB to our 900 GB")
    assert "300.0 times ours" in check.verdict


@pytest.mark.parametrize("faster", ["mean", "p90"])
def test_who_sends_less_and_answers_about_as_soon_beats_us(faster):
    """No price explains that."""
    figures = changed("trace/fixed_t/unfinished", 0)
    figures["trace"]["fixed_t"][faster] = 1.9 * figures["trace"]["prfaas"][faster]
    check = egress(figures)
    assert check.missed and check.verdict == "NO"


def test_bounds_include_their_ends():
    """And leave room for rounding only."""
    assert at_least("x", 40.0 - 1e-12, 40).ok and not at_least("x", 39.99, 40).ok
    assert at_most("x", 1.1, 1.1).ok and not at_most("x", 1.11, 1.1).ok
    assert between("x", 11.5, 11.5, 13.5).ok and not between("x", 13.6, 11.5, 13.5).ok
    assert near("x", 3.24 * 1.03, 3.24).ok and not near("x", 3.24 * 1.04, 3.24).ok
