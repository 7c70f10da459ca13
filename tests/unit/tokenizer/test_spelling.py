"""The bytes of single tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from prfaas.tokenizer.spelling import BYTES, spelled
from prfaas.tokenizer.text import TextTokenizer, unpack
from tests.unit.tokenizer.byte_level import EOS, EOS_ID


def test_the_table_is_that_of_byte_level_vocabularies():
    """Every byte has a character of its own, the same as the library uses."""
    assert sorted(BYTES.values()) == list(range(256))
    assert set(BYTES) == set(pre_tokenizers.ByteLevel.alphabet())


@given(text=st.text())
def test_the_bytes_of_its_tokens_are_the_text(tokenizer: TextTokenizer, text: str):
    """Also where characters are cut."""
    token_ids = unpack(tokenizer.encode(text, add_special_tokens=False))
    assert b"".join([tokenizer.token_bytes(token_id) for token_id in token_ids]) == text.encode()


def test_special_tokens_are_spelled_as_they_are_written(tokenizer: TextTokenizer):
    """Unknown ids are nothing."""
    assert tokenizer.token_bytes(EOS_ID) == EOS.encode()
    assert tokenizer.token_bytes(tokenizer.vocabulary_size) == b""


@pytest.mark.parametrize(
    ("token", "meant"), [("▁the", b" the"), ("<0xE4>", b"\xe4"), ("<0xE>", b"<0xE>"), ("é", "é".encode())]
)
def test_sentencepiece_tokens(token: str, meant: bytes):
    """A space is written as U+2581 and a single byte by its number."""
    assert spelled(token, byte_level=False) == meant
