"""Where a text may be cut so that its parts have the tokens of the whole, and what is remembered of such parts.

A tokenizer takes its added tokens out of the text first, the leftmost first and of those the longest; what lies between
them is normalised, split and merged piece by piece, each without sight of the others. So where an added token begins,
the text can be cut: what precedes has the same pieces, and what follows begins with the same token. This holds for
tokens that

- are looked for in the text as it was written (not `normalized`),
- are matched wherever they stand (not `single_word`) and take no space in front of them (not `lstrip`),
- cannot be hidden by one that begins before them: no inner part of any added token may be their beginning, or begin
  with them.

What must hold: the tokens of the parts, one after the other, are those of the whole text, whatever the text is.

Parts begin at the left and are cut at the first safe place at which they are long enough. So a conversation that goes
on has the parts it had before, up to its end, and only the rest is new.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Shorter parts would cost more to look up than to encode.
MIN_CHARACTERS = 256
#: Digest, dictionary entry and the object around the tokens.
ENTRY_BYTES = 200
DIGEST_BYTES = 16


def safe_tokens(added: Sequence[Any]) -> tuple[str, ...]:
    """Those of a tokenizer's added tokens in front of which a text may be cut, in the order given."""
    contents = [token.content for token in added]
    return tuple(
        token.content
        for token in added
        if token.content
        and not (token.normalized or token.single_word or token.lstrip)
        and not any(_hides(other, token.content) for other in contents)
    )


def _hides(other: str, content: str) -> bool:
    """Whether a match of `other` may begin before `content` does and reach into it."""
    return any(content.startswith(other[start:]) or other[start:].startswith(content) for start in range(1, len(other)))


class Cuts:
    """Cuts texts in front of any of `tokens`, into parts of at least `min_characters` except for the last."""

    def __init__(self, tokens: Sequence[str], min_characters: int = MIN_CHARACTERS) -> None:
        self._min_characters = min_characters
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def parts(self, text: str) -> Iterator[str]:
        start = 0
        if self._pattern is not None:
            for found in self._pattern.finditer(text):
                if found.start() - start >= self._min_characters:
                    yield text[start : found.start()]
                    start = found.start()
        yield text[start:]


class RememberedParts:
    """The packed tokens of parts, the least recently used forgotten first, within `bound_bytes`."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._tokens: OrderedDict[bytes, bytes] = OrderedDict()
        self.nbytes = 0

    def find(self, key: bytes) -> bytes | None:
        packed = self._tokens.get(key)
        if packed is not None:
            self._tokens.move_to_end(key)
        return packed

    def learn(self, found: Mapping[bytes, bytes]) -> None:
        for key, packed in found.items():
            if key not in self._tokens:
                self._tokens[key] = packed
                self.nbytes += len(packed) + ENTRY_BYTES
        while self.nbytes > self._bound_bytes:
            _, packed = self._tokens.popitem(last=False)
            self.nbytes -= len(packed) + ENTRY_BYTES

    def check(self) -> None:
        assert self.nbytes == sum(len(packed) + ENTRY_BYTES for packed in self._tokens.values()) <= self._bound_bytes


def key_of(part: str) -> bytes:
    return hashlib.blake2b(part.encode(), digest_size=DIGEST_BYTES).digest()
