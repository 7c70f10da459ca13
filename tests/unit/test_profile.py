"""What a model costs, from the paper's tables and between them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.curve import Curve
from prfaas.errors import ConfigError
from prfaas.profile import CASE_STUDY, GBPS, MIB, PUBLISHED_PHI, DecodeProfile, Profile, shipped

H200, H20 = shipped(CASE_STUDY, "h200"), shipped(CASE_STUDY, "h20")
#: tokens, MiB, seconds, Gbps
CASE_STUDY_TABLE = (
    (1024, 190.8, 0.44, 3.61),
    (8192, 308.9, 0.72, 3.59),
    (32768, 701.3, 1.84, 3.19),
    (131072, 2316.3, 7.40, 2.62),
)


@pytest.mark.parametrize(("tokens", "mib", "seconds", "gbps"), CASE_STUDY_TABLE)
def test_the_case_study_reproduces_the_papers_table(tokens: int, mib: float, seconds: float, gbps: float) -> None:
    """Size and time are the table's own; their quotient is its Phi_kv within the rounding of the three columns."""
    assert H200.kv_bytes(tokens) == pytest.approx(mib * MIB)
    assert H200.prefill_s(tokens) == pytest.approx(seconds)
    half_digit = 0.005 / seconds + 0.05 / mib + 0.005 / gbps
    assert H200.phi_bytes_per_s(tokens) / GBPS == pytest.approx(gbps, rel=half_digit)


@pytest.mark.parametrize(("tokens", "ratio"), [(10_200, 2.25), (27_500, 2.67), (62_400, 2.77)])
def test_the_implied_h20_takes_so_much_longer_than_the_h200(tokens: int, ratio: float) -> None:
    """The ratios that the paper's throughput implies, at the lengths where it implies them."""
    assert H20.prefill_s(tokens) / H200.prefill_s(tokens) == pytest.approx(ratio)


@pytest.mark.parametrize(("tokens", "seconds"), [(10_200, 1.83), (27_500, 4.27), (62_400, 9.73)])
def test_the_implied_h20_is_near_the_seconds_read_off_straight_lines(tokens: int, seconds: float) -> None:
    """Those seconds lie on straight lines between the table's points, which read high where prefill is convex."""
    assert 0.94 * seconds < H20.prefill_s(tokens) < seconds


def test_h20_is_slower_at_every_length_and_stores_the_same_bytes() -> None:
    """Hardware changes the time, the model decides the size."""
    for tokens in range(64, 200_000, 777):
        assert H20.prefill_s(tokens) > 2 * H200.prefill_s(tokens)
        assert H20.kv_bytes(tokens) == H200.kv_bytes(tokens)


def test_a_cached_prefix_saves_the_time_of_computing_it() -> None:
    """T(total) - T(cached): the same suffix costs more the longer the prefix is that it attends to."""
    whole = H20.prefill_s(60_000)
    assert H20.prefill_s(40_000) + H20.prefill_s(60_000, 40_000) == pytest.approx(whole)
    assert H20.prefill_s(60_000, 60_000) == 0
    assert H20.prefill_s(110_000, 100_000) > H20.prefill_s(20_000, 10_000)


def test_the_state_of_fixed_size_crosses_whatever_the_receiver_has_cached() -> None:
    """Rows per token are saved by a cached prefix; the recurrent state is of one exact length and always moves."""
    state = H200.kv_bytes(0)
    assert 150 * MIB < state < 190 * MIB
    assert H200.kv_bytes(32_768, 32_768) == pytest.approx(state)
    assert H200.kv_bytes(32_768, 8_192) == pytest.approx(state + (701.3 - 308.9) * MIB)


def test_decode_of_the_paper_is_20_sequences_in_25_ms() -> None:
    """40 tokens/s for each of 20 sequences, and never more than the memory holds."""
    decode = H20.decode
    assert decode is not None
    assert decode.step_s(20) == pytest.approx(0.025)
    assert [decode.batch_within(limit) for limit in (0.025, 0.02499, 0.0079, 0.0078, 1.0)] == [20, 19, 1, 0, 20]
    assert [decode.batch_within(limit) for limit in (0.0, -1.0, math.nan)] == [0, 0, 0]


@given(st.floats(0.0, 0.1), st.floats(1e-6, 0.1), st.integers(1, 512), st.floats(1e-4, 10.0))
def test_the_largest_batch_within_a_limit_meets_it_and_one_more_does_not(
    base: float, per_sequence: float, most: int, limit: float
) -> None:
    """Whatever the profile, the batch is the largest that meets the limit."""
    decode = DecodeProfile(base, per_sequence, most)
    batch = decode.batch_within(limit)
    assert batch == 0 or decode.step_s(batch) <= limit * (1 + 1e-8)
    assert batch == most or decode.step_s(batch + 1) > limit


def test_whether_a_higher_threshold_relieves_the_link_depends_on_the_model() -> None:
    """Phi_kv falls with length for the case study from 8K on; for most published hybrids it rises first."""
    phi = [H200.phi_bytes_per_s(tokens) for tokens in range(8192, 131_073, 1024)]
    assert all(after < before for before, after in itertools.pairwise(phi))
    falls = {m: all(b < a for a, b in itertools.pairwise(phi.ys)) for m, phi in PUBLISHED_PHI.items()}
    rises = {m: all(a < b for a, b in itertools.pairwise(phi.ys)) for m, phi in PUBLISHED_PHI.items()}
    assert [m for m in falls if falls[m]] == ["ring-2.5-1t"]
    assert [m for m in rises if rises[m]] == ["kimi-linear-48b", "mimo-v2-flash-309b"]
    assert len(PUBLISHED_PHI) == 6


def test_published_phi_is_the_papers() -> None:
    """Spot checks of the table, in bits."""
    assert PUBLISHED_PHI["minimax-m2.5-229b"](32 * 1024) * 8 / 1e9 == pytest.approx(59.93)
    assert PUBLISHED_PHI["kimi-linear-48b"](128 * 1024) * 8 / 1e9 == pytest.approx(4.88)


def test_what_is_not_published_is_refused_with_the_reason() -> None:
    """A quotient gives neither of its parts, and nobody is served a profile of something else."""
    with pytest.raises(ConfigError, match="only Phi_kv is published"):
        shipped("ring-2.5-1t", "h200")
    with pytest.raises(ConfigError, match="no profile ships for gpt"):
        shipped("gpt", "h200")
    with pytest.raises(ConfigError, match="h200, h20"):
        shipped(CASE_STUDY, "b300")


def test_the_pace_of_prefill_does_not_jump_at_a_measured_length() -> None:
    """A jump would hold a balanced threshold at that length."""
    for tokens in (8192, 27_500, 32_768, 62_400):
        before, after = H20.prefill_s(tokens, tokens - 1), H20.prefill_s(tokens + 1, tokens)
        assert before == pytest.approx(after, rel=0.01)


def test_a_prompt_shorter_than_any_measured_takes_time_in_proportion() -> None:
    """Nothing shorter was measured, and no tokens take no time."""
    assert H200.prefill_s(512) == pytest.approx(0.22)
    assert H200.prefill_s(0) == 0


def test_a_profile_in_which_more_tokens_cost_less_is_refused() -> None:
    """Such a measurement is wrong, and every decision made from it would be."""
    good = Curve.through([(5, 1), (10, 2)], from_zero=True)
    bad = Curve.through([(5, 2), (10, 1)], from_zero=True)
    for prefill, kv in [(bad, good), (good, bad), (Curve.through([(0, 1), (1, 2)]), good)]:
        with pytest.raises(ValueError, match=r"never fall|no time"):
            Profile("h", "m", prefill, kv)
