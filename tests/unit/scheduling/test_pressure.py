"""How hard each part of the prefill path is pressed, and what crosses."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.curve import Curve
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.pressure import PressureModel, Supply
from tests.unit.scheduling.cut_lengths import expect_above
from tests.unit.scheduling.steering_scenes import PROFILES

LENGTHS = Lengths.log_normal(9.90, 1.00, 128, 131_072)
H200, H20 = PROFILES["h200"], PROFILES["h20"]
MODEL = PressureModel.of(LENGTHS, H200, H20)
SUPPLY = Supply(remote_nodes=4, local_nodes=3, link_bytes_per_s=1e9)


def test_nodes_that_keep_up_send_what_is_offered():
    """lambda * P(L>t) * E[S_kv | L>t]."""
    t, rate = 19_400, 0.5
    at = MODEL.at(t, rate, SUPPLY)
    assert at.remote < 1
    offered = rate * LENGTHS.tail(t) * expect_above(LENGTHS, H200.kv_bytes, t)
    assert at.egress_bytes_per_s == pytest.approx(offered)
    assert at.link == pytest.approx(offered / 1e9)


def test_busy_nodes_send_what_they_make():
    """N * E[S_kv | L>t] / E[T | L>t], however much is offered: N * Phi_kv of the long prompts."""
    t = 19_400
    made = 4 * expect_above(LENGTHS, H200.kv_bytes, t) / expect_above(LENGTHS, H200.prefill_s, t)
    for rate in (10.0, 100.0):
        at = MODEL.at(t, rate, SUPPLY)
        assert at.remote > 1 and at.egress_bytes_per_s == pytest.approx(made)
    assert made == pytest.approx(4 * H200.phi_bytes_per_s(45_000), rel=0.05)


@given(st.integers(128, 130_000), st.integers(128, 130_000), st.floats(0.01, 20))
def test_pressure_moves_from_one_side_to_the_other_with_t(one, other, rate):
    """A higher t is never more work for the remote nodes nor less for the local ones."""
    low, high = sorted((one, other))
    below, above = MODEL.at(low, rate, SUPPLY), MODEL.at(high, rate, SUPPLY)
    assert above.remote <= below.remote * (1 + 1e-9) and above.local >= below.local * (1 - 1e-9)
    if below.remote <= 1:
        assert above.egress_bytes_per_s <= below.egress_bytes_per_s * (1 + 1e-9)


def test_raising_t_relieves_a_busy_link_only_where_phi_falls():
    """With a KV that grows faster than prefill takes, busy nodes send more when they get longer prompts."""
    growing = replace(H200, kv=Curve.through([(0.0, 0.0), (32_768.0, 2e8), (131_072.0, 6e9)]))
    assert growing.phi_bytes_per_s(100_000) > growing.phi_bytes_per_s(30_000)
    model, busy = PressureModel.of(LENGTHS, growing, H20), 10.0
    assert model.at(40_000, busy, SUPPLY).egress_bytes_per_s > model.at(20_000, busy, SUPPLY).egress_bytes_per_s
    assert MODEL.at(40_000, busy, SUPPLY).egress_bytes_per_s < MODEL.at(20_000, busy, SUPPLY).egress_bytes_per_s


def test_nothing_to_do_presses_nothing_and_no_nodes_press_without_limit():
    at = MODEL.at(131_072, 1.0, Supply(remote_nodes=0, local_nodes=0, link_bytes_per_s=0))
    assert (at.remote, at.link, at.local, at.worst) == (0.0, 0.0, math.inf, math.inf)
    unknown = MODEL.at(0, 1.0, Supply(remote_nodes=4, local_nodes=3, link_bytes_per_s=None))
    assert unknown.link is None and unknown.worst == unknown.remote


def test_what_the_queues_are_like():
    """E[L | L <= t] and E[L | L > t], as in the paper's case study."""
    assert MODEL.short_tokens(19_400) == pytest.approx(10_200, rel=0.02)
    assert MODEL.long_tokens(19_400) == pytest.approx(45_000, rel=0.02)
    assert (MODEL.short_tokens(100), MODEL.long_tokens(131_072)) == (None, None)
