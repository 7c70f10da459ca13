"""Probabilities in the two forms of the API."""

import math
from collections.abc import Iterator

import pytest

from prfaas.tokenizer.text import TextTokenizer, load_tokenizer, unpack
from services.router.openai.generation import Scored
from services.router.openai.logprobs import LOWEST, chat_logprobs, text_logprobs
from tests.unit.tokenizer.byte_level import write_model_dir


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def letters(tokenizer: TextTokenizer) -> tuple[int, int, int]:
    a, b, c = (unpack(tokenizer.encode(letter, add_special_tokens=False))[0] for letter in "abc")
    return a, b, c


def test_the_token_itself_is_always_among_the_likeliest_of_a_text(
    tokenizer: TextTokenizer, letters: tuple[int, int, int]
):
    """So there may be one more than was asked for, in the order of probability."""
    a, b, c = letters
    seen = Scored(c, -3.0, ((a, -0.5), (b, -1.5)), 4)
    shown = text_logprobs([seen], 2, tokenizer)
    assert list(shown.top_logprobs[0].items()) == [("a", -0.5), ("b", -1.5), ("c", -3.0)]
    assert (shown.tokens, shown.token_logprobs, shown.text_offset) == (("c",), (-3.0,), (4,))
    assert text_logprobs([seen], 0, tokenizer).top_logprobs == ({"c": -3.0},)


def test_a_chat_shows_exactly_as_many_as_were_asked_for(tokenizer: TextTokenizer, letters: tuple[int, int, int]):
    """With their bytes."""
    a, b, c = letters
    [shown] = chat_logprobs([Scored(c, -3.0, ((a, -0.5), (b, -1.5)), 0)], 1, tokenizer).content
    assert (shown.token, shown.logprob, shown.bytes) == ("c", -3.0, (99,))
    assert [(top.token, top.logprob, top.bytes) for top in shown.top_logprobs] == [("a", -0.5, (97,))]
    assert chat_logprobs([Scored(c, -3.0, ((a, -0.5),), 0)], 0, tokenizer).content[0].top_logprobs == ()


def test_parts_of_characters_are_shown_by_their_bytes(tokenizer: TextTokenizer):
    """So that different tokens look different, and the text can be put together again."""
    token_ids = unpack(tokenizer.encode("\U0001f980", add_special_tokens=False))
    scored = [Scored(token_id, -1.0, (), 0) for token_id in token_ids]
    shown = chat_logprobs(scored, 0, tokenizer).content
    assert bytes(byte for each in shown for byte in each.bytes).decode() == "\U0001f980"
    assert shown[0].token.startswith("\\xf0")
    assert text_logprobs(scored, 0, tokenizer).tokens[0].startswith("bytes:\\xf0")


def test_what_is_impossible_is_a_number_too(tokenizer: TextTokenizer, letters: tuple[int, int, int]):
    """JSON has no infinity."""
    a, b, _ = letters
    [shown] = chat_logprobs([Scored(a, -math.inf, ((b, -math.inf),), 0)], 1, tokenizer).content
    assert (shown.logprob, shown.top_logprobs[0].logprob) == (LOWEST, LOWEST)
