"""Texts cut into parts that have the tokens of the whole."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prfaas.tokenizer.segments import ENTRY_BYTES, Cuts, RememberedParts, key_of, safe_tokens
from prfaas.tokenizer.text import SHORT_CHARACTERS, TextTokenizer, pack

TURN, END = "<|turn|>", "<|end|>"
#: Among them some in front of which no cut is safe.
ADDED = [
    AddedToken(TURN, special=True, normalized=False),
    AddedToken(END, special=True, normalized=False),
    AddedToken("<|turn|>x", special=True, normalized=False),
    AddedToken("<left>", special=True, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("<word>", special=True, normalized=False, single_word=True),
    AddedToken("<Normal>", special=False, normalized=True),
    AddedToken("[in", special=True, normalized=False),
    AddedToken("x[i", special=True, normalized=False),
]
SAFE = (TURN, END, "<|turn|>x", "<right>")
CORPUS = ["the lazy dog jumps over the quick brown fox " * 5, "Grüße 你好 🙂 TURN turn|> <| end " * 5]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """The first word of a text is not like the others, and letters are folded."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def prepending() -> Tokenizer:
    """As older Llama models have it: the space in front is the normaliser's."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


TOKENIZERS = {build.__name__: build() for build in (byte_level, sentencepiece, prepending)}
for each in TOKENIZERS.values():
    each.add_tokens(ADDED)
#: Tokens, parts of them, and what may lie between.
BITS = [token.content for token in ADDED] + [
    "<", "<|", "|>", "turn", "<|tur", "n|>", "x", "[", "in", " ", "  ", "\n", "the", "Fox", "é", "e\u0301", "\u00a0",
    "你", "🙂", "\ufb01",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=3)), max_size=30).map("".join)


def test_only_tokens_that_nothing_can_hide_are_safe():
    """And none that look at what is in front of them, or for which the text is changed first."""
    assert safe_tokens(ADDED) == SAFE


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
@example(text=f"the {TURN} the{TURN}x  {END}{END}[in x[in<right> a <left> b <word>c <word> {TURN}")
@settings(max_examples=400, deadline=None)
def test_the_parts_have_the_tokens_of_the_whole(kind: str, text: str):
    """Cut at every safe place there is, whatever the tokenizer does with what lies between."""
    tokenizer = TOKENIZERS[kind]

    def ids(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False).ids)

    parts = list(Cuts(SAFE, min_characters=1).parts(text))
    assert "".join(parts) == text
    assert [token_id for part in parts for token_id in ids(part)] == ids(text)


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), least=st.integers(1, 40))
@settings(max_examples=200)
def test_a_text_that_goes_on_keeps_its_parts(texts: list[str], least: int):
    """All but the last, which was cut by the text's end."""
    cuts = Cuts(SAFE, least)
    before = [""]
    for count in range(1, len(texts) + 1):
        parts = list(cuts.parts(TURN.join(texts[:count])))
        assert all(len(part) >= least for part in parts[:-1])
        assert parts[: len(before) - 1] == before[:-1]
        before = parts


@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=300)), max_size=40), st.integers(0, 1500))
def test_what_is_remembered_is_bounded(learned: list[tuple[int, bytes]], bound: int):
    """In bytes, whatever comes; what was used last stays longest."""
    remembered = RememberedParts(bound)
    for number, packed in learned:
        remembered.learn({b"%d" % number: packed})
        remembered.check()
        if len(packed) + ENTRY_BYTES <= bound:
            assert remembered.find(b"%d" % number) is not None


def test_a_part_that_is_used_again_outlives_the_others():
    """The least recently used is forgotten first."""
    remembered = RememberedParts(2 * ENTRY_BYTES)
    remembered.learn({b"a": b"", b"b": b""})
    assert remembered.find(b"a") == b""
    remembered.learn({b"c": b""})
    assert (remembered.find(b"a"), remembered.find(b"b"), remembered.find(b"c")) == (b"", None, b"")


async def test_of_a_conversation_only_the_end_is_encoded_again(tokenizer: TextTokenizer):
    """What was said before is remembered, and the ids are the same as ever."""

    def rendered(turns: int) -> str:
        return tokenizer.render(
            [{"role": "user", "content": f"{turn} " + "the quick fox " * 400} for turn in range(turns)]
        )

    for turns in (2, 3, 4):
        text = rendered(turns)
        before = tokenizer.remembered.nbytes
        assert await tokenizer.encode_aside(text, add_special_tokens=False) == tokenizer.encode(
            text, add_special_tokens=False
        )
        learned = tokenizer.remembered.nbytes - before
        assert learned <= 4 * len(rendered(2)) if turns == 2 else learned < 2 * len(rendered(1))
    before = tokenizer.remembered.nbytes
    await tokenizer.encode_aside(text, add_special_tokens=False)
    assert tokenizer.remembered.nbytes == before


async def test_a_remembered_part_is_not_encoded(tokenizer: TextTokenizer):
    """Its tokens come from memory: what was put there is what is given."""
    text = "<|im_start|>user\n" + "a" * (2 * SHORT_CHARACTERS)
    tokenizer.remembered.learn({key_of(text): pack([7, 8])})
    assert await tokenizer.encode_aside(text, add_special_tokens=False) == pack([7, 8])


async def test_requests_at_once_do_not_mix(tokenizer: TextTokenizer):
    """They share what is remembered and the threads."""
    texts = [
        tokenizer.render([{"role": "user", "content": f"{number % 3} " + "fox " * 2000}] * 3) for number in range(12)
    ]
    encoded = await asyncio.gather(*[tokenizer.encode_aside(text, add_special_tokens=False) for text in texts])
    assert encoded == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    tokenizer.remembered.check()
