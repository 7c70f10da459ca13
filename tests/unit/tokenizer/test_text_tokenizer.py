"""A model folder's tokenizer: text to packed ids and back."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer, pack, unpack
from tests.unit.tokenizer.byte_level import BOS, BOS_ID, EOS_ID, plain


@given(text=st.text().filter(plain))
def test_text_survives_the_round_trip(tokenizer: TextTokenizer, text: str):
    """Decoding what was encoded gives the text back, except for special tokens."""
    assert tokenizer.decode(unpack(tokenizer.encode(text, add_special_tokens=True))) == text


@given(text=st.text(alphabet=st.characters() | st.sampled_from("the quick brown fox\u0301\u0345\u1100\u1161\u11a8")))
def test_no_text_has_fewer_tokens_than_told(tokenizer: TextTokenizer, text: str):
    """So what is too long by that need not be encoded to be refused; and a long text is told to be long."""
    assert tokenizer.fewest_tokens(text) <= len(unpack(tokenizer.encode(text, add_special_tokens=False)))
    assert tokenizer.fewest_tokens("x" * 10_000_000) > 10_000


def test_ids_are_little_endian_uint32():
    """As they cross the wire."""
    assert pack([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert list(unpack(pack([7, 2**32 - 1]))) == [7, 2**32 - 1]


def test_special_tokens_are_added_only_on_request(tokenizer: TextTokenizer):
    """Chat templates write their own."""
    assert unpack(tokenizer.encode("x", add_special_tokens=True))[0] == BOS_ID
    assert unpack(tokenizer.encode("x", add_special_tokens=False))[0] != BOS_ID


def test_special_and_unknown_ids_have_no_text(tokenizer: TextTokenizer):
    """They are not part of an answer."""
    plain = unpack(tokenizer.encode("fox", add_special_tokens=False))[0]
    assert tokenizer.has_text(plain)
    assert not tokenizer.has_text(EOS_ID)
    assert not tokenizer.has_text(tokenizer.vocabulary_size)


async def test_a_long_text_does_not_hold_up_the_event_loop(tokenizer: TextTokenizer):
    """It is encoded in a thread that lets go of the interpreter lock, to the same ids."""
    text = "the quick brown fox " * 50_000
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    packed = await tokenizer.encode_aside(text, add_special_tokens=False)
    turning.cancel()
    assert turns > 100
    assert packed == tokenizer.encode(text, add_special_tokens=False)


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path):
    """Also one whose file cannot be read."""
    with pytest.raises(ConfigError):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        load_tokenizer(tmp_path)


def test_a_chat_becomes_a_prompt_that_ends_with_the_assistants_turn(tokenizer: TextTokenizer):
    """The template of the model folder, with its special tokens."""
    assert tokenizer.render([{"role": "user", "content": "Hi <&>"}]) == (
        f"{BOS}<|im_start|>user\nHi <&><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("where", ["file", "named", "none"])
def test_templates_are_found_where_models_keep_them(model_dir: Path, tmp_path: Path, where: str):
    """In a file of its own, as one of several named ones; without any, chat is refused."""
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {"chat_template": named} if where == "named" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text("yes")
    tokenizer = load_tokenizer(tmp_path)
    if where == "none":
        with pytest.raises(InvalidRequest):
            tokenizer.render([])
    else:
        assert tokenizer.render([]) == "yes"


async def test_a_tokenizer_that_contradicts_itself_is_found_at_the_start(model_dir: Path):
    """Whichever way a request takes, it must get the same ids."""
    tokenizer = load_tokenizer(model_dir)
    await tokenizer.test()
    text = tokenizer.remembered
    for key in list(text._tokens):
        text._tokens[key] = pack([7])
    with pytest.raises(ConfigError):
        await tokenizer.test()
    tokenizer.close()
