"""Byte-pair encoding with tiktoken, which takes a sixth of the time, for vocabularies for which it gives the same
tokens.

The two differ in what they merge. `tokenizers` merges the pairs of a list, in its order; tiktoken any pair whose union
is a token, the lowest id first. They agree when

- the list is in the order of the ids that its pairs make, and
- the list alone puts every token together from its bytes. For then it has every pair that can come up: two neighbours
  that make a token `t` have come to be as they would have in `t` alone, where they are merged.

Beside that, the text must be cut into words by a pattern that both read alike, and nothing may be done to it before: no
normaliser but NFC, and only for texts that it would not change. Added tokens must be plain strings, none the beginning
of another. For any other vocabulary, and any other text, there is no encoding here.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy
import tiktoken
import tokenizers

from prfaas.tokenizer.spelling import BYTES

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Of Llama 3 and of Qwen 2; both were compared over all of Unicode, like that of GPT-2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = frozenset({GPT2, LLAMA3, QWEN2})
#: tiktoken tracks back over white space, and gives up on very much of it.
MUCH = 256
MUCH_SPACE, SPACES = re.compile(rf"\s{{{MUCH}}}"), re.compile(r"\s\s")
#: Words that are checked together: what the library tells of each takes much more memory than the word.
AT_ONCE = 1024
PARTS = {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"}


class FastEncoding:
    """Encodes without adding special tokens. Safe to use from several threads; it lets go of the interpreter lock."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], added: Mapping[str, int], *, nfc: bool) -> None:
        self._encoding = tiktoken.Encoding(
            "model", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(added)
        )
        self._nfc = nfc

    def encode(self, text: str) -> bytes | None:
        """The packed ids; None for a text that is not for tiktoken."""
        if _has_much_space(text) or (self._nfc and not unicodedata.is_normalized("NFC", text)):
            return None
        try:
            ids = self._encoding.encode_to_numpy(text, allowed_special="all", disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair, which only the other method reads
            ids = numpy.array(self._encoding.encode(text, allowed_special="all", disallowed_special=()), numpy.uint32)
        return ids.astype("<u4", copy=False).tobytes()


def _has_much_space(text: str) -> bool:
    """So much white space covers two places in a row of those that are half as far apart."""
    return SPACES.search(text[:: MUCH // 2]) is not None and MUCH_SPACE.search(text) is not None


def fast_encoding(definition: str) -> FastEncoding | None:
    """For the vocabulary of a tokenizer.json, if it is one of which it is certain that it gives the same tokens."""
    whole = json.loads(definition)
    model, added = whole["model"], whole["added_tokens"]
    pattern, normalizer = _pattern(whole["pre_tokenizer"]), whole["normalizer"]
    if pattern not in PATTERNS or normalizer not in (None, {"type": "NFC"}):
        return None
    if model["type"] != "BPE" or any(model.get(name) for name in PARTS - {"type", "unk_token"}):
        return None
    specials = {token["content"]: token["id"] for token in added}
    ranks = _ranks(model["vocab"], specials)
    if ranks is None or not _plain(added) or not _agrees(model, specials):
        return None
    return FastEncoding(pattern, ranks, specials, nfc=normalizer is not None)


def _pattern(pre_tokenizer: Any) -> str:
    """By which text is cut into words; empty where that is not all that is done."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return ""


def _plain(added: list[dict[str, Any]]) -> bool:
    contents = [token["content"] for token in added]
    return all(
        not (token["normalized"] or token["single_word"] or token["lstrip"] or token["rstrip"]) for token in added
    ) and not any(one != other and other.startswith(one) for one in contents for other in contents)


def _ranks(vocab: Mapping[str, int], added: Mapping[str, int]) -> dict[bytes, int] | None:
    """The bytes of all tokens; None unless they are byte-level ones, with every byte among them."""
    words = {token: token_id for token, token_id in vocab.items() if token not in added}
    if not all(character in BYTES for token in words for character in token):
        return None
    ranks = {bytes([BYTES[character] for character in token]): token_id for token, token_id in words.items()}
    return ranks if all(bytes([byte]) in ranks for byte in range(256)) else None


def _agrees(model: Mapping[str, Any], added: Mapping[str, int]) -> bool:
    """The two conditions above. They do not look at whole words that are tokens, which both take at once."""
    vocab: Mapping[str, int] = model["vocab"]
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    made = [vocab[left + right] for left, right in pairs]
    if made != sorted(made):
        return False
    merges = [(left, right) for left, right in pairs]
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(vocab), merges=merges))
    words = [token for token in vocab if token not in added]
    return all(_alone(bare, vocab, words[at : at + AT_ONCE]) for at in range(0, len(words), AT_ONCE))


def _alone(bare: Any, vocab: Mapping[str, int], words: list[str]) -> bool:
    """Whether each of the words is put together whole."""
    encoded = bare.encode_batch_fast(words, add_special_tokens=False)
    return all(each.ids == [vocab[word]] for word, each in zip(words, encoded, strict=True))
