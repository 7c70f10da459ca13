"""Opposite `prfaas/scheduling/turns.py`."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.turns import Priority, Ticket, Turns, Waiting

QUANTUM = 100
tickets = itertools.count(1)


def one(
    tenant: str, tokens: int, weight: float = 1.0, priority: Priority = Priority.NORMAL, since_s: float = 0.0
) -> Waiting:
    return Waiting(
        ticket=Ticket(next(tickets)),
        tenant=tenant,
        tokens=tokens,
        sequences=1,
        priority=priority,
        weight=weight,
        since_s=since_s,
    )


def queue(*waiting: Waiting, ageing_s: float = 10.0) -> Turns:
    turns = Turns(ageing_s, QUANTUM)
    for each in waiting:
        turns.add(each)
    return turns


def order(turns: Turns, now: float = 0.0) -> list[str]:
    taken = []
    while (next_one := turns.take(lambda _: True, now)) is not None:
        turns.check()
        taken.append(next_one.tenant)
    return taken


def test_one_tenants_flood_does_not_stand_before_anothers_request():
    """It was there first, and its second request still comes after the other's first."""
    flood = [one("flood", 100) for _ in range(50)]
    assert order(queue(*flood, one("other", 100)))[:3].count("other") == 1


def test_weights_share_tokens_not_requests():
    """A tenant of three times the weight, whose requests are three times as long, gets as many through; one with the
    same weight and long requests gets fewer."""
    turns = queue(*(one("heavy", 300, 3.0) for _ in range(40)), *(one("light", 100) for _ in range(40)))
    assert abs(Counter(order(turns)[:40])["heavy"] - 20) <= 2
    turns = queue(*(one("long", 300) for _ in range(40)), *(one("short", 100) for _ in range(40)))
    assert abs(Counter(order(turns)[:40])["long"] - 10) <= 2


@given(
    st.lists(st.integers(1, 1000), min_size=60, max_size=60),
    st.lists(st.integers(1, 1000), min_size=60, max_size=60),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_two_that_always_wait_are_never_further_apart_than_the_bound(
    first: list[int], second: list[int], first_weight: float, second_weight: float
):
    """In tokens over weight: the largest request over either's weight, and two quanta."""
    turns = queue(*(one("a", n, first_weight) for n in first), *(one("b", n, second_weight) for n in second))
    got = {"a": 0.0, "b": 0.0}
    bound = 1000 / first_weight + 1000 / second_weight + 2 * QUANTUM
    left = Counter({"a": 60, "b": 60})
    while all(left.values()):
        taken = turns.take(lambda _: True, 0.0)
        assert taken is not None
        turns.check()
        got[taken.tenant] += taken.tokens / taken.weight
        left[taken.tenant] -= 1
        assert abs(got["a"] - got["b"]) <= bound + 1e-6


def test_who_has_priority_goes_first_and_who_has_waited_long_has_it():
    """By one class for each ageing time."""
    low, normal = one("low", 10, priority=Priority.LOW), one("normal", 10, since_s=0.0)
    high = [one("high", 10, priority=Priority.HIGH, since_s=19.0) for _ in range(3)]
    assert order(queue(*high, normal, low), 9.0) == ["high", "high", "high", "normal", "low"]
    served = order(queue(*high, normal, low), 20.0)
    assert {"normal", "low"} <= set(served[:4]), "all are of one class by now, and share by rounds"


def test_nobody_is_let_past_one_that_does_not_fit():
    """A large request would else wait for ever while small ones slip by."""
    turns = queue(one("large", 5000), ageing_s=1.0)
    assert turns.take(lambda each: each.tokens < 1000, 0.0) is None
    for now in range(20):
        turns.add(one("small", 10, since_s=float(now)))
        taken = turns.take(lambda each: each.tokens < 1000, float(now))
        turns.check()
        if taken is None:
            break
    served = order(turns, 100.0)
    assert "large" in served


def test_in_a_full_queue_the_tenant_that_takes_most_gives_way():
    """Its last requests do, and only while it takes more than the newcomer's tenant; a better class needs no share."""
    flood = [one("flood", 100) for _ in range(10)]
    turns = queue(*flood)
    assert turns.give_way(one("other", 150), 0, 150, 0.0) == [flood[9], flood[8]]
    assert turns.give_way(one("flood", 100), 1, 100, 0.0) == []
    assert turns.give_way(one("other", 2000), 0, 2000, 0.0) == [], "it would take more than the flood"
    assert turns.give_way(one("other", 5, priority=Priority.LOW), 1, 5, 0.0) == []
    assert turns.give_way(one("other", 2000, priority=Priority.HIGH), 1, 0, 0.0) == [flood[9]]
    assert turns.give_way(one("other", 2000, priority=Priority.HIGH), 1, 0, 10.0) == [], "they have aged"


@given(st.integers(1, 1000), st.floats(0.1, 1.0), st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_nobody_starves(tokens: int, weight: float, flood: list[int]):
    """However much of high priority comes, and as fast as it is served: the last class takes two ageing times to be of
    the first, and then its turn comes after so many rounds."""
    turns = queue(one("low", tokens, weight, Priority.LOW), ageing_s=10.0)
    rounds = tokens / (QUANTUM * weight) + 1
    for now in range(20 + int(rounds * 2 * (QUANTUM + 1))):
        turns.add(one("flood", flood[now % len(flood)], 1.0, Priority.HIGH, since_s=float(now)))
        taken = turns.take(lambda _: True, float(now))
        assert taken is not None
        if taken.tenant == "low":
            assert now >= 20
            return
    raise AssertionError("it starved")
