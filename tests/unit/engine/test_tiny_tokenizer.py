"""The tokenizer of the tiny models: small, lossless, and the same everywhere."""

import json
from pathlib import Path

import jinja2
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prfaas.engine.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_TOKENS, build_tokenizer, write_tokenizer

TOKENIZER = build_tokenizer()


def test_every_model_output_is_a_token() -> None:
    """512 ids, no more and no fewer: whatever a tiny model draws can be decoded."""
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_TOKENS))
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    """Any text, spaces and all scripts included, comes back as it went in."""
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_two_folders_hold_the_same_tokenizer(tmp_path: Path) -> None:
    """The file is part of the namespace, so training must come out byte for byte the same."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b"))
    assert first == second
    assert Tokenizer.from_str(first.decode()).encode("The model").ids == TOKENIZER.encode("The model").ids


def test_a_conversation_is_framed_by_special_tokens(tmp_path: Path) -> None:
    """The chat template ends where the assistant is to go on, and each marker is a single token."""
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": "Hello"}]
    text = jinja2.Template(settings["chat_template"]).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text).ids
    assert [token for token in ids if token < 3] == [1, 2, 1]
