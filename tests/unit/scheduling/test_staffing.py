"""What shares of time amount to, and the threshold that suits them."""

import pytest

from prfaas.profile import GBPS
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.staffing import best_threshold, staffed
from prfaas.scheduling.throughput import Approximation, CostModel, Fleet
from tests.unit.scheduling.steering_scenes import PROFILES

FLEET = Fleet(
    n_prfaas=4,
    n_pd=8,
    prfaas=PROFILES["h200"],
    pd=PROFILES["h20"],
    link_bytes_per_s=100 * GBPS,
    output_tokens=1024,
    step_limit_s=0.025,
)
LENGTHS = Lengths.log_normal(9.90, 1.00, 128, 131_072)


def test_whole_nodes_count_whole():
    found = staffed(FLEET, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert (found.prefill_nodes, found.decode_nodes) == (3.0, 5.0)


@pytest.mark.parametrize("roles", [Roles.WHOLE, Roles.MIXED])
def test_what_the_planner_plans_sustains_what_it_says(roles):
    """The same arithmetic, from the other side."""
    found = plan(FLEET, LENGTHS, roles, Approximation.MEAN)
    assert isinstance(found, RolePlan)
    mixed = [found.mixed.prefill_share] if found.mixed is not None else []
    staffing = staffed(FLEET, [*[1.0] * found.n_p, *mixed, *[0.0] * found.n_d])
    model = CostModel.of(FLEET, LENGTHS, Approximation.MEAN)
    rates = staffing.rates(FLEET, model, found.threshold_tokens)
    assert rates.lambda_max == pytest.approx(found.throughput.lambda_max, rel=1e-6)


def test_the_threshold_suits_the_nodes():
    """More prefill nodes here, more prompts here; at 3 and 5 the paper's 19.4K."""
    model = CostModel.of(FLEET, LENGTHS, Approximation.MEAN)
    three, four = (best_threshold(FLEET, model, staffed(FLEET, [1.0] * n + [0.0] * (8 - n))) for n in (3, 4))
    assert three[0] == pytest.approx(19_400, rel=0.03)
    assert three[1].lambda_max == pytest.approx(3.24, rel=0.03)
    assert four[0] > three[0]


def test_no_prefill_node_here_means_that_everything_crosses():
    model = CostModel.of(FLEET, LENGTHS, Approximation.MEAN)
    assert best_threshold(FLEET, model, staffed(FLEET, [0.0] * 8))[0] < 200


def test_the_batch_follows_the_load():
    """Little's law with a step that grows with the batch: full at the stage's limit, small at little load."""
    five = staffed(FLEET, [0.0] * 5)
    assert five.batch_at(FLEET, 5 * FLEET.decode_requests_per_s) == pytest.approx(20, rel=0.01)
    assert five.batch_at(FLEET, 1.0) == pytest.approx(1024 / 5 * 0.007 / (1 - 1024 / 5 * 0.0009))
    assert five.batch_at(FLEET, 50.0) == 20
    assert staffed(FLEET, [1.0]).batch_at(FLEET, 1.0) == 20
