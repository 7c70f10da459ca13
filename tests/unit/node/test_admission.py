"""Admission: room is taken before it is used and given back exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import Overloaded
from prfaas.node.admission import Admission, Limits
from prfaas.request import AttemptId

LIMITS = Limits(max_sequences=3, max_tokens=1000, max_prefill_tokens=500, max_prefills=2)


def attempt(number: int) -> AttemptId:
    return AttemptId(f"{number:032x}")


def test_field_E1_a_sequence_counts_its_output_before_it_exists():
    """Growth is admitted at reserve time: nothing that was admitted can run out of room later."""
    admission = Admission(LIMITS)
    admission.take_sequence(attempt(1), 600)
    with pytest.raises(Overloaded, match="tokens"):
        admission.take_sequence(attempt(2), 401)
    admission.take_sequence(attempt(3), 400)


def test_a_full_house_refuses_by_name():
    """The refusal says which resource is short, so that an operator knows which limit to move."""
    admission = Admission(LIMITS)
    for number in range(3):
        admission.take_sequence(attempt(number), 1)
    with pytest.raises(Overloaded, match="sequences"):
        admission.take_sequence(attempt(9), 1)
    assert admission.refused == 1


def test_an_idle_node_takes_a_prompt_longer_than_its_queue():
    """The queue's bound limits waiting; it must not make long prompts impossible."""
    admission = Admission(LIMITS)
    admission.take_prefill(attempt(1), 5000)
    with pytest.raises(Overloaded, match="prefill tokens"):
        admission.take_prefill(attempt(2), 1)


def test_field_E3_prefills_are_bounded_in_number():
    """A decode node still takes a bounded number of fallback prefills."""
    admission = Admission(LIMITS)
    admission.take_prefill(attempt(1), 1)
    admission.take_prefill(attempt(2), 1)
    with pytest.raises(Overloaded, match="prefills"):
        admission.take_prefill(attempt(3), 1)
    admission.end_prefill(attempt(1))
    admission.take_prefill(attempt(3), 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sequence", "prefill", "recount", "end", "release"]),
            st.integers(0, 5),
            st.integers(0, 700),
        )
    )
)
def test_whatever_the_order_the_books_agree(steps: list[tuple[str, int, int]]):
    """Every charge has one owner and is given back once, also when releases repeat."""
    admission, sequences, prefills = Admission(LIMITS), set(), set()
    for step, number, tokens in steps:
        try:
            match step:
                case "sequence" if number not in sequences:
                    admission.take_sequence(attempt(number), tokens)
                    sequences.add(number)
                case "prefill" if number not in prefills:
                    admission.take_prefill(attempt(number), tokens)
                    prefills.add(number)
                case "recount" if number in prefills:
                    admission.recount_prefill(attempt(number), tokens)
                case "end":
                    admission.end_prefill(attempt(number))
                    prefills.discard(number)
                case "release":
                    admission.release(attempt(number))
                    prefills.discard(number)
                    sequences.discard(number)
        except Overloaded:
            pass
        admission.check()
        assert (admission.sequences, admission.prefills) == (len(sequences), len(prefills))
    for number in range(6):
        admission.release(attempt(number))
        admission.release(attempt(number))
    assert (admission.committed_tokens, admission.prefill_tokens) == (0, 0)
