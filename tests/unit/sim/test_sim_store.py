"""The store in virtual time, and what routers make of it: outages, lost data, leases that end."""

import pytest

from prfaas.errors import PeerUnavailable
from prfaas.membership.store import Batch, Deleted, LeaseExpired, Put, Resync
from prfaas.sim.kernel import Kernel
from prfaas.sim.store import SimStore

HOP_S = 0.01


class Desk:
    def __init__(self) -> None:
        self.kernel = Kernel(0)
        self.store = SimStore(self.kernel, HOP_S)
        self.told: list[tuple[float, Batch]] = []
        self.store.watch(self.hear)

    def hear(self, events: Batch) -> None:
        self.told.append((self.kernel.now(), events))

    def run(self, until: float) -> None:
        self.kernel.run_until(until)

    def last(self) -> Batch:
        return self.told[-1][1]


def test_a_watcher_hears_first_what_there_is_and_then_each_change_a_hop_later():
    """In order, with revisions that rise."""
    desk = Desk()
    desk.run(1.0)
    assert isinstance(desk.last()[0], Resync)
    desk.store.put_now("k", b"v")
    desk.run(2.0)
    at, (event,) = desk.told[-1]
    assert at == pytest.approx(1.0 + HOP_S)
    assert isinstance(event, Put) and (event.entry.key, event.entry.value) == ("k", b"v")


def test_keys_go_with_their_lease():
    """Not before it is over, and never while it is renewed."""
    desk = Desk()
    lease = desk.store.grant_now(10)
    desk.store.put_now("k", b"v", lease)
    desk.run(8.0)
    desk.store.renew_now(lease)
    desk.run(17.0)
    assert desk.store.get_now("k") is not None
    desk.run(18.5)
    desk.store.tick()
    desk.run(19.0)
    assert isinstance(desk.last()[0], Deleted)
    with pytest.raises(LeaseExpired):
        desk.store.renew_now(lease)


def test_an_outage_is_told_to_who_asks_and_hidden_from_who_watches():
    """Afterwards watchers hear what there is."""
    desk = Desk()
    desk.store.put_now("k", b"v")
    desk.run(1.0)
    heard = len(desk.told)
    desk.store.fail()
    with pytest.raises(PeerUnavailable):
        desk.store.put_now("k", b"w")
    desk.run(5.0)
    assert len(desk.told) == heard
    desk.store.recover(empty=False)
    desk.run(6.0)
    (resync,) = desk.last()
    assert isinstance(resync, Resync) and [entry.value for entry in resync.snapshot.entries] == [b"v"]


def test_an_outage_ends_no_leases():
    """However long it was; from then on they run again."""
    desk = Desk()
    lease = desk.store.grant_now(10)
    desk.store.put_now("k", b"v", lease)
    desk.store.fail()
    desk.run(100.0)
    desk.store.recover(empty=False)
    desk.run(105.0)
    assert desk.store.get_now("k") is not None
    desk.run(111.0)
    assert desk.store.get_now("k") is None


def test_a_store_may_come_back_empty():
    """With revisions that begin again, and leases that nobody knows."""
    desk = Desk()
    lease = desk.store.grant_now(10)
    desk.store.put_now("k", b"v", lease)
    desk.run(1.0)
    desk.store.fail()
    desk.store.recover(empty=True)
    desk.run(2.0)
    (resync,) = desk.last()
    assert isinstance(resync, Resync) and resync.snapshot.entries == ()
    with pytest.raises(LeaseExpired):
        desk.store.renew_now(lease)


def test_of_two_who_compare_and_put_one_wins():
    """The other is told so."""
    desk = Desk()

    async def write(value: bytes) -> int | None:
        return await desk.store.compare_and_put("k", value, 0)

    tasks = [desk.kernel.spawn(write(value), value.decode()) for value in (b"a", b"b")]
    desk.run(1.0)
    won = [task.result() is not None for task in tasks]
    assert sorted(won) == [False, True]
    entry = desk.store.get_now("k")
    assert entry is not None and entry.value == (b"a" if won[0] else b"b")


def test_a_broken_watch_hears_of_everything_in_the_end():
    """Of nothing meanwhile, and then of all that there is; two breaks are over when both are."""
    desk = Desk()
    desk.run(1.0)
    heard = len(desk.told)
    desk.store.break_watch(desk.hear, 2.0)
    desk.store.break_watch(desk.hear, 4.0)
    desk.store.put_now("k", b"v")
    desk.run(4.5)
    assert len(desk.told) == heard
    desk.run(6.0)
    (resync,) = desk.last()
    assert isinstance(resync, Resync) and [entry.value for entry in resync.snapshot.entries] == [b"v"]


def test_a_watch_may_repeat_the_latest_changes():
    """As they were, in their order."""
    desk = Desk()
    for value in (b"1", b"2", b"3"):
        desk.store.put_now("k", value)
    desk.run(1.0)
    desk.store.repeat(desk.hear, 2)
    desk.run(2.0)
    assert [event.entry.value for event in desk.last() if isinstance(event, Put)] == [b"2", b"3"]
