"""tiktoken against the library whose tokens it has to give."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prfaas.tokenizer.fast import GPT2, LLAMA3, QWEN2, FastEncoding, fast_encoding
from prfaas.tokenizer.text import pack

CORPUS = (
    "the quick brown fox jumps over the lazy dog, isn't it? We'll see: 1234567 times " * 20,
    "Grüße, señor - naïve café 你好世界 🙂👍🏽 Привет\r\n\r\n  if x == 1024:\n\treturn 'ok'  \n" * 20,
)


def trained(pattern: str, *, nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if pattern == GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(content, special=True, normalized=False) for content in ("<|turn|>", "<|end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2}
TOKENIZERS = {name: trained(pattern) for name, pattern in PATTERNS.items()} | {"nfc": trained(QWEN2, nfc=True)}


def fast(name: str) -> FastEncoding:
    encoding = fast_encoding(TOKENIZERS[name].to_str())
    assert encoding is not None
    return encoding


FAST = {name: fast(name) for name in TOKENIZERS}
BITS = [
    "<|turn|>",
    "<|end|>",
    "<|",
    "|>",
    "'",
    "'s",
    "'LL",
    "\u017f",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u0085",
    "\u00a0",
]
BITS += ["\u3000", "the", " fox", "1", "12345", "é", "e\u0301", "你", "🙂", "\u200d", "\u2167", "\u0661"]
#: Large blocks in which all characters are alike: ideographs, syllables, private use, the higher planes.
ALIKE = (
    range(0x3400, 0xA000),
    range(0xAC00, 0xD7A4),
    range(0xE000, 0xF900),
    range(0x17000, 0x18D00),
    range(0x20000, 0x110000),
)
TEXTS = st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=4)), max_size=40).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=500, deadline=None)
def test_the_tokens_are_the_same(name: str, text: str):
    """Whatever the text: special tokens and parts of them, white space of all kinds, digits, marks."""
    packed = FAST[name].encode(text)
    assert packed is None or packed == pack(TOKENIZERS[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", PATTERNS)
def test_words_end_at_the_same_characters(name: str):
    """Every character of Unicode, between and after characters of each class that the patterns know. Of blocks in which
    all are alike, some."""
    alike = {code for block in ALIKE for code in block[1:-1]} - set(range(0, 0x110000, 0x1FF))
    codes = [code for code in range(sys.maxunicode + 1) if code not in alike and not 0xD800 <= code < 0xE000]
    tokenizer, encoding = TOKENIZERS[name], FAST[name]
    for start in range(0, len(codes), 0x2000):
        characters = map(chr, codes[start : start + 0x2000])
        text = "".join([f"a{one}a 1{one}1 .{one}. '{one}a \n{one} {one}{one}" for one in characters])
        [expected] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        assert encoding.encode(text) == pack(expected.ids), f"from U+{codes[start]:04X}"


def test_texts_that_are_not_for_it_are_left_to_the_other():
    """What normalising would change, and white space that it cannot take back."""
    assert FAST["nfc"].encode("e\u0301") is None
    assert FAST["qwen2"].encode("e\u0301") is not None
    for name in PATTERNS:
        assert FAST[name].encode("a" + " " * 1_000_000 + "b") is None
        assert FAST[name].encode("a" * 100_000) is not None


@pytest.mark.parametrize("before", [0, 1, 127, 128, 129, 255, 256])
def test_much_white_space_is_found_wherever_it_begins(before: int):
    """One character less is not much."""
    assert FAST["llama3"].encode("a" * before + " \n" * 128 + "b") is None
    assert FAST["llama3"].encode("a" * before + (" \n" * 128)[1:] + "b") is not None


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    definition: dict[str, Any] = json.loads(TOKENIZERS["gpt2"].to_str())
    change(definition)
    return json.dumps(definition)


def swap_merges(definition: dict[str, Any]) -> None:
    merges = definition["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def add_token_that_no_merge_makes(definition: dict[str, Any]) -> None:
    definition["model"]["vocab"]["xqzw"] = 700


@pytest.mark.parametrize(
    "change",
    [
        swap_merges,
        add_token_that_no_merge_makes,
        lambda whole: whole["model"].update(type="Unigram"),
        lambda whole: whole["model"].update(byte_fallback=True),
        lambda whole: whole["model"].update(dropout=0.1),
        lambda whole: whole["model"]["vocab"].pop("!"),
        lambda whole: whole["pre_tokenizer"].update(add_prefix_space=True),
        lambda whole: whole["pre_tokenizer"].update(use_regex=False),
        lambda whole: whole.update(pre_tokenizer=None),
        lambda whole: whole.update(normalizer={"type": "Lowercase"}),
        lambda whole: whole["added_tokens"][0].update(lstrip=True),
        lambda whole: whole["added_tokens"][0].update(normalized=True),
        lambda whole: whole["added_tokens"][0].update(content="<|end|>x"),
    ],
)
def test_for_other_vocabularies_there_is_none(change: Callable[[dict[str, Any]], object]):
    """When in doubt, the library that made the tokenizer.json is used."""
    assert fast_encoding(changed(lambda _: None)) is not None
    assert fast_encoding(changed(change)) is None
