"""Opposite `prfaas/node/engine_share.py`: who is due, and what the loop makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.node.engine_share import LEAST_SHARE, TimeShare


def divided(share: TimeShare, step_s: float, chunk_s: float, turns: int = 2000) -> float:
    """The share of the time that prefill gets when there is always work of both kinds."""
    decode_s = prefill_s = 0.0
    for _ in range(turns):
        if share.prefill_due:
            share.prefilled(chunk_s)
            prefill_s += chunk_s
        else:
            share.decoded(step_s)
            decode_s += step_s
    return prefill_s / (prefill_s + decode_s)


@given(wanted=st.floats(0.1, 0.9), step_s=st.floats(0.001, 0.05), chunk_s=st.floats(0.001, 0.05))
def test_time_is_divided_as_wanted_however_long_a_piece_of_work_takes(wanted: float, step_s: float, chunk_s: float):
    """A share is one of time, not of turns."""
    assert divided(TimeShare(wanted), step_s, chunk_s) == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize(("wanted", "given"), [(0.0, LEAST_SHARE), (1.0, 1 - LEAST_SHARE), (float("nan"), 0.5)])
def test_nobody_starves(wanted: float, given: float):
    """Work left over from another role still comes to its end. A share that is no number means half."""
    assert divided(TimeShare(wanted), 0.01, 0.02) == pytest.approx(given, abs=0.03)


def test_without_a_share_the_kinds_take_turns():
    """One step, one chunk."""
    assert divided(TimeShare(), 0.01, 0.03) == pytest.approx(0.75, abs=0.01)


def test_an_idle_time_is_not_saved_up():
    """Decode that was alone for a minute owes prefill nothing."""
    share = TimeShare(0.5)
    for _ in range(1000):
        share.alone()
    share.decoded(0.01)
    share.prefilled(0.01)
    assert not share.prefill_due


def test_decode_comes_first():
    """A prefill that arrives waits for one step, not a step for a chunk."""
    assert not TimeShare().prefill_due and not TimeShare(0.9).prefill_due
