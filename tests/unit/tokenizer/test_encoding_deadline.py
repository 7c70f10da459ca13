"""A text that does not get its turn to be encoded is not waited for without end."""

import asyncio
import threading

import pytest

from prfaas.errors import DeadlineExceeded
from prfaas.tokenizer import text as texts
from prfaas.tokenizer.text import ASIDE_THREADS, SHORT_CHARACTERS, TextTokenizer


async def test_field_C1_a_text_that_is_never_encoded_is_given_up(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
):
    """All threads hang; and when they go on the next text is encoded as ever."""
    monkeypatch.setattr(texts, "ASIDE_S", 0.2)
    long, go_on = "word " * SHORT_CHARACTERS, threading.Event()
    stuck = [tokenizer._aside.submit(go_on.wait) for _ in range(ASIDE_THREADS)]
    try:
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExceeded, match="tokenize"):
                await tokenizer.encode_aside(long, add_special_tokens=True)
    finally:
        go_on.set()
    for each in stuck:
        each.result(10)
    monkeypatch.setattr(texts, "ASIDE_S", 30.0)
    encoded = await tokenizer.encode_aside(long, add_special_tokens=True)
    assert encoded == tokenizer.encode(long, add_special_tokens=True)
