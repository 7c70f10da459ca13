"""Who goes next: urgent before patient, tenants by weight, a tenant's attempts evenly, and nobody never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.outbox import Outbox
from prfaas.transfer.outgoing import Urgency

FRAME = 100


def served(outbox: Outbox, turns: int, now: float = 0.0) -> list[str]:
    found = []
    for _ in range(turns):
        attempt = outbox.first(now)
        assert attempt is not None
        outbox.charge(attempt, FRAME, now)
        outbox.check()
        found.append(attempt)
    return found


def put(outbox: Outbox, attempt: str, **fields: object) -> None:
    values = {"urgency": Urgency.NORMAL, "tenant": "t", "weight": 1.0, "nbytes": 1000, "now": 0.0} | fields
    outbox.put(attempt, **values)


def test_the_more_urgent_goes_first():
    outbox = Outbox(ageing_s=1.0)
    for attempt, urgency in [("b", Urgency.BACKGROUND), ("n", Urgency.NORMAL), ("f", Urgency.FINISHING)]:
        put(outbox, attempt, urgency=urgency)
    assert served(outbox, 2) == ["f", "f"]
    put(outbox, "f", urgency=Urgency.FINISHING, nbytes=0)
    assert served(outbox, 2) == ["n", "n"]


def test_who_has_waited_too_long_gets_one_turn():
    """Also behind work that never ends."""
    outbox = Outbox(ageing_s=1.0)
    put(outbox, "f", urgency=Urgency.FINISHING)
    put(outbox, "b", urgency=Urgency.BACKGROUND)
    assert served(outbox, 3, now=0.9) == ["f"] * 3
    assert served(outbox, 3, now=1.0) == ["b", "f", "f"]
    assert served(outbox, 2, now=2.0) == ["b", "f"]


def test_two_transfers_of_a_tenant_are_even():
    outbox = Outbox(ageing_s=1.0)
    put(outbox, "x")
    put(outbox, "y")
    turns = served(outbox, 20)
    assert turns.count("x") == turns.count("y") == 10


@pytest.mark.parametrize("weight", [0.25, 3.0, 10.0])
def test_tenants_share_by_weight_whatever_the_number_of_their_transfers(weight: float):
    outbox = Outbox(ageing_s=1.0)
    put(outbox, "heavy", tenant="h", weight=weight)
    for attempt in ("l0", "l1", "l2"):
        put(outbox, attempt, tenant="l")
    turns = served(outbox, 440)
    assert turns.count("heavy") == pytest.approx(440 * weight / (1 + weight), abs=2)
    assert max(turns.count(a) for a in ("l0", "l1", "l2")) - min(turns.count(a) for a in ("l0", "l1", "l2")) <= 1


def test_who_comes_late_does_not_catch_up():
    """A share is of the present, not of the past."""
    outbox = Outbox(ageing_s=1.0)
    put(outbox, "old", tenant="o")
    served(outbox, 50)
    put(outbox, "new", tenant="n")
    turns = served(outbox, 10)
    assert turns.count("new") in (5, 6)


def test_who_comes_and_goes_gets_no_more_than_who_stays():
    """A tenant whose transfer has something to send only now and then is served like the others while it has."""
    outbox = Outbox(ageing_s=1.0)
    put(outbox, "stays", tenant="s")
    count = 0
    for _ in range(100):
        put(outbox, "comes", tenant="c")
        (turn,) = served(outbox, 1)
        count += turn == "comes"
        put(outbox, "comes", tenant="c", nbytes=0)
    assert count == pytest.approx(50, abs=2)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.sampled_from(list(Urgency)[1:])), max_size=60)
)
def test_only_who_has_something_is_served(changes: list[tuple[str, int, Urgency]]):
    outbox, model = Outbox(ageing_s=0.5), {}
    for now, (attempt, nbytes, urgency) in enumerate(changes):
        put(outbox, attempt, tenant=(attempt in "abc" and "x") or "y", nbytes=nbytes, urgency=urgency, now=now / 5)
        model[attempt] = nbytes
        outbox.check()
        assert outbox.waiting_bytes == sum(model.values())
        turn = outbox.first(now / 5)
        assert (turn is None) == (not any(model.values()))
        if turn is not None:
            assert model[turn]
            outbox.charge(turn, 1, now / 5)
