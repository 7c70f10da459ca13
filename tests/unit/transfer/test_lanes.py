"""How many lanes a line is worth, and how long a peer that fails is left alone."""

import pytest

from prfaas.transfer.frames import Cause
from prfaas.transfer.lanes import Rest, wanted_lanes


@pytest.mark.parametrize(
    ("line_bytes_per_s", "rtt_s", "lanes"),
    [(None, 0.03, 4), (125e6, None, 4), (125e6, 0.001, 4), (125e6, 0.13, 7), (1.25e9, 0.08, 16)],
)
def test_a_longer_line_is_worth_more_lanes(line_bytes_per_s: float | None, rtt_s: float | None, lanes: int):
    """Line times round trip in windows of one connection, between 4 and a limit."""
    assert wanted_lanes(line_bytes_per_s, rtt_s, 4, 16) == lanes


def test_a_peer_that_keeps_failing_rests_longer_each_time():
    """Up to a limit; and as soon as bytes get through it starts again."""
    rest, now, rests = Rest(0.1, 1.0), 0.0, []
    for _ in range(6):
        rest.failed(Cause.CONNECT, "refused", now)
        rests.append(rest.until - now)
        assert not rest.over(now) and rest.over(rest.until)
        now = rest.until
    assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    rest.recovered()
    rest.failed(Cause.PEER_GONE, "closed", now)
    assert rest.until - now == pytest.approx(0.1)


def test_lanes_that_fail_together_count_once():
    rest = Rest(0.1, 1.0)
    for _ in range(8):
        rest.failed(Cause.PEER_GONE, "closed", 5.0)
    assert rest.until == pytest.approx(5.1)
