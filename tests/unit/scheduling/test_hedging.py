"""When a hedge is begun, and that there are never too many."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.hedging import FEWEST, MOST, UNKNOWN_RATIO, HedgeParams, Hedging

PARAMS = HedgeParams(factor=1.5, share=0.1, burst=2.0, least_s=0.01)


def test_until_something_is_known_prefills_are_taken_to_be_slow():
    """A hedge is no guess: it waits for three times what was predicted, and half as much again."""
    hedging = Hedging(PARAMS)
    assert hedging.after_s(1.0) == 1.5 * UNKNOWN_RATIO
    for _ in range(FEWEST):
        hedging.took(1.0, 1.1)
    assert round(hedging.after_s(2.0), 6) == round(1.5 * 1.1 * 2.0, 6)


def test_what_is_usual_is_what_95_of_100_take_of_the_latest():
    """A slow one among twenty does not count; when they are all slow, that is usual."""
    hedging = Hedging(PARAMS)
    for number in range(100):
        hedging.took(1.0, 50.0 if number % 25 == 0 else 1.0)
    assert hedging.after_s(1.0) == 1.5
    for _ in range(MOST):
        hedging.took(1.0, 4.0)
    assert hedging.after_s(1.0) == 6.0
    hedging.check()


@given(st.lists(st.sampled_from(["prefill", "take", "took"]), max_size=300))
def test_hedges_are_never_more_than_their_share(events):
    """Whatever comes in whatever order: no more than a tenth of the prefills, and two on top."""
    hedging = Hedging(PARAMS)
    for event in events:
        match event:
            case "prefill":
                hedging.after_s(1.0)
            case "take":
                hedging.take()
            case _:
                hedging.took(1.0, 1.0)
        hedging.check()
    assert hedging.started <= 2 + 0.1 * hedging.prefills + 1e-9


def test_there_is_room_again_after_more_prefills():
    """Ten of them, here."""
    hedging = Hedging(PARAMS)
    assert [hedging.take() for _ in range(3)] == [True, True, False]
    for _ in range(11):
        hedging.after_s(1.0)
    assert [hedging.take() for _ in range(2)] == [True, False]
