"""Opposite `prfaas/scheduling/allowance.py`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.allowance import Account, Bucket, Quota


def test_a_bucket_says_exactly_when_to_come_back():
    """60 a minute: the bucket is full at first; then one comes each second."""
    bucket = Bucket(60.0, 1, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60)
    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(30, 10.0) == 20.0
    assert bucket.wait_s(30, 30.0) == 0


def test_a_part_does_not_make_impossible_what_the_limit_allows():
    """A quarter of 1000 tokens a minute holds 250. A request of 900 is let in when it is full, and its debt is paid
    before the next."""
    bucket = Bucket(1000.0, 4, 0.0)
    assert bucket.wait_s(900, 0.0) == 0
    bucket.take(900)
    assert bucket.wait_s(250, 0.0) == pytest.approx(900 / 250 * 60)


def test_what_was_used_of_the_old_limit_stays_used():
    """A file that is read again is no new minute."""
    account = Account(Quota(tokens_per_min=600, requests_per_min=10), 0.0)
    account.take(600, 1)
    account.follow(Quota(tokens_per_min=1200, requests_per_min=10), 0.0)
    assert account.tokens is not None and account.tokens.level == 600
    account.follow(Quota(tokens_per_min=600, requests_per_min=10), 0.0)
    assert account.tokens.level == 0
    account.follow(Quota(), 0.0)
    assert account.tokens is None and account.requests is None


steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.floats(0, 1)), max_size=60)


@given(steps, st.integers(1, 5))
def test_over_any_time_no_more_is_granted_than_the_rate(taken: list[tuple[float, int, float]], parts: int):
    """Over all parts: the rate times the time, what a bucket holds at first, and one request's debt. What is given back
    was not used."""
    limit, now, used = 400.0, 0.0, 0.0
    bucket = Bucket(limit, parts, now)
    for pause_s, amount, unused in taken:
        now += pause_s
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount)
            bucket.give_back(amount * unused)
            used += amount * (1 - unused)
        bucket.check()
        assert used <= limit / parts / 60 * now + limit + 1e-3
