"""Stop strings in text that arrives in pieces."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.tokenizer.stop_strings import Passed, StopStrings

#: Few letters, so that stop strings occur, overlap and nearly occur.
TEXT = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the match that ends first; of those that end together, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, negative_length = min(ends)
    return text[: end + negative_length], True


def pieces(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=500)
def test_the_cut_does_not_depend_on_how_the_text_arrives(text: str, stops: list[str], cuts: list[int]):
    """Across any border of tokens, the text ends right before the stop string."""
    machine, shown = StopStrings(stops), ""
    for piece in pieces(text, cuts):
        passed = machine.push(piece)
        shown += passed.text
        if passed.stopped:
            assert (shown, True) == reference(text, stops)
            return
    assert (shown + machine.flush(), False) == reference(text, stops)


@given(text=TEXT, stops=STOPS)
@settings(max_examples=300)
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(text: str, stops: list[str]):
    """What is held is exactly the longest end of the text that some stop string begins with."""
    if reference(text, stops)[1]:
        return
    machine = StopStrings(stops)
    machine.push(text)
    begins = [text[start:] for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in stops)]
    assert machine.flush() == max(begins, key=len, default="")


def test_without_stop_strings_all_passes():
    """The common case."""
    assert StopStrings([]).push("text") == Passed("text")
