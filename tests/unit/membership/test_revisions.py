"""Opposite `prfaas/membership/revisions.py`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.membership.revisions import HistoryGone, Revisions
from prfaas.membership.store import Deleted, Lease, LeaseExpired, Put

KEYS = st.sampled_from(["/a", "/a/1", "/a/2", "/b"])
LEASES = st.sampled_from([Lease(1), Lease(2)])
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.binary(max_size=2), st.none() | LEASES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("grant"), LEASES, st.integers(1, 3)),
    st.tuples(st.just("renew"), LEASES),
    st.tuples(st.just("pass"), st.integers(1, 3)),
)


def everything(key: str) -> bool:
    return True


def perform(data: Revisions, step: tuple, now: float) -> float:
    """One step; a lease that is unknown, or known already, changes nothing. Returns the time after it."""
    try:
        match step:
            case "put", key, value, lease:
                data.put(key, value, lease)
            case "delete", key:
                data.delete(lambda other: other == key)
            case "grant", lease, ttl_s:
                data.revoke(lease)
                data.grant(lease, ttl_s, now)
            case "renew", lease:
                data.renew(lease, now)
            case "pass", seconds:
                now += seconds
                data.expire(now)
    except LeaseExpired as error:
        if step[0] == "grant":
            data.grant(error.lease, step[2], now)
    return now


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=40), st.integers(1, 8))
def test_history_rebuilds_every_state_and_every_change_it_keeps(steps: list[tuple], history_limit: int):
    """For each revision still kept: the listing then is the listing now taken back, and the changes since lead from the
    one to the other. What is not kept is refused, never answered wrongly."""
    data, now = Revisions(history_limit), 0.0
    states = {data.revision: data.select(everything)}
    for step in steps:
        before = data.revision
        now = perform(data, step, now)
        if data.revision > before + 1:  # several leases ended at once; the states between were never seen
            states.clear()
        states[data.revision] = data.select(everything)
        data.check()
    for revision, state in states.items():
        if revision < data.compacted:
            with pytest.raises(HistoryGone):
                data.changes(everything, revision)
            with pytest.raises(HistoryGone):
                data.select(everything, revision)
            continue
        assert data.select(everything, revision) == state
        replayed = {entry.key: entry for entry in state}
        for event in data.changes(everything, revision):
            match event:
                case Put(entry):
                    replayed[entry.key] = entry
                case Deleted(key, _):
                    del replayed[key]
        assert replayed == {entry.key: entry for entry in data.select(everything)}


def test_all_keys_of_a_lease_end_in_one_revision():
    """Who sees one of them gone sees all of them gone."""
    data = Revisions(history_limit=100)
    data.grant(Lease(7), 10, now=0.0)
    for key in ("/b", "/a"):
        data.put(key, b"", Lease(7))
    after = data.revision
    data.expire(9.9)
    assert data.revision == after
    data.expire(10.0)
    assert data.changes(everything, after) == [Deleted("/b", after + 1), Deleted("/a", after + 1)]
    assert data.next_expiry() is None


def test_a_key_put_again_has_left_its_lease():
    """It lives as its last put says, and the lease ends without it."""
    data = Revisions(history_limit=100)
    data.grant(Lease(7), 10, now=0.0)
    data.put("/a", b"", Lease(7))
    data.put("/a", b"")
    data.check()
    data.expire(10.0)
    assert data.get("/a") is not None


def test_a_renewed_lease_starts_again():
    """Its whole time counts from the renewal."""
    data = Revisions(history_limit=100)
    data.grant(Lease(7), 10, now=0.0)
    assert data.renew(Lease(7), now=8.0) == 10
    data.expire(17.9)
    assert data.next_expiry() == 18.0
    data.expire(18.0)
    with pytest.raises(LeaseExpired):
        data.renew(Lease(7), now=18.0)


def test_the_future_is_no_history():
    """A reader that knows a later revision than the store has knows another store."""
    data = Revisions(history_limit=100)
    with pytest.raises(HistoryGone):
        data.select(everything, data.revision + 1)
    with pytest.raises(HistoryGone):
        data.compact(data.revision + 1)
