"""Text from tokens as they arrive."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prfaas.tokenizer.bytewise import BytewiseDetokenizer
from prfaas.tokenizer.incremental import IncrementalDetokenizer
from prfaas.tokenizer.text import TextTokenizer, unpack
from tests.unit.tokenizer.byte_level import EOS_ID, plain

TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("你好🙂é\ufffd \n")), max_size=60)


def bytewise(tokenizer: TextTokenizer) -> BytewiseDetokenizer:
    assert tokenizer.bytes_of is not None
    return BytewiseDetokenizer(tokenizer.bytes_of)


Kind = Callable[[TextTokenizer], BytewiseDetokenizer | IncrementalDetokenizer]
#: Both have to say the same of a byte-level vocabulary.
KINDS: list[Kind] = [IncrementalDetokenizer, bytewise]


def ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    return list(unpack(tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT.filter(plain), batch=st.integers(1, 7))
@example(text="\ufffd" * 40 + "a", batch=1)
@example(text="👍🏽" * 20, batch=3)
@settings(max_examples=300)
def test_pieces_make_up_the_text(kind: Kind, tokenizer: TextTokenizer, text: str, batch: int):
    """Whatever the text and however its tokens arrive, nothing is lost, repeated or shown in parts."""
    detokenizer = kind(tokenizer)
    token_ids = ids(tokenizer, text)
    shown = ""
    for start in range(0, len(token_ids), batch):
        shown += detokenizer.push(token_ids[start : start + batch])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300)
def test_any_tokens_give_what_they_decode_to(kind: Kind, tokenizer: TextTokenizer, data: st.DataObject):
    """Also tokens that make no valid text: a model may say anything."""
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size + 3), max_size=80))
    detokenizer = kind(tokenizer)
    shown = "".join([detokenizer.push([token_id]) for token_id in token_ids])
    assert shown + detokenizer.flush() == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_waits_for_its_last_token(kind: Kind, tokenizer: TextTokenizer):
    """A character that the vocabulary knows only by its bytes comes with the last of them, and not later."""
    *beginning, last = ids(tokenizer, "\U0001f980")
    assert beginning
    detokenizer = kind(tokenizer)
    assert detokenizer.push(beginning) == ""
    assert detokenizer.push([last]) == "\U0001f980"


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_character_shows_at_the_end(kind: Kind, tokenizer: TextTokenizer):
    """Generation may stop anywhere; then its bytes are shown as what they are."""
    detokenizer = kind(tokenizer)
    assert detokenizer.push([*ids(tokenizer, "a"), EOS_ID, ids(tokenizer, "\U0001f980")[0]]) == "a"
    assert detokenizer.flush() == "\ufffd"


class Counting:
    """A vocabulary that counts the tokens it has been asked to decode."""

    bytes_of = None

    def __init__(self, vocabulary: TextTokenizer) -> None:
        self._vocabulary = vocabulary
        self.decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return self._vocabulary.decode(token_ids)

    def has_text(self, token_id: int) -> bool:
        return self._vocabulary.has_text(token_id)


@pytest.mark.parametrize("text", ["the lazy dog ", "🙂", "\ufffd", "\U0001f980"])
def test_the_cost_is_linear(tokenizer: TextTokenizer, text: str):
    """Twice the tokens, twice the work, also for text that is held back again and again."""

    def decoded(token_ids: list[int]) -> int:
        vocabulary = Counting(tokenizer)
        IncrementalDetokenizer(vocabulary).push(token_ids)
        return vocabulary.decoded

    token_ids = ids(tokenizer, text * 200)
    assert decoded(token_ids * 2) <= 2.2 * decoded(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_bytes_without_end_are_shown_and_forgotten(kind: Kind, tokenizer: TextTokenizer):
    """They are held back only until no later byte can complete them."""
    stray = ids(tokenizer, "\U0001f980")[0]
    detokenizer = kind(tokenizer)
    shown = [len(detokenizer.push([stray])) for _ in range(100)]
    assert sum(shown) >= 90
