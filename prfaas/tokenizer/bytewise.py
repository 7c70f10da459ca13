"""Text from tokens as they arrive, for vocabularies in which each token is some bytes and a text all of them in a row.

Nothing depends on the token before then, so that nothing is decoded twice: `incremental` is for the others. Both hold
back a character until its last byte, and show bytes that are no text as U+FFFD.
"""

import codecs
from collections.abc import Iterable, Mapping

UTF_8 = codecs.getincrementaldecoder("utf-8")


class BytewiseDetokenizer:
    """One sequence's way from tokens to text. `bytes_of` knows every id; those without text are empty."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = UTF_8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final now. Tokens may arrive in batches of any size."""
        return self._decoder.decode(b"".join([self._bytes_of[token_id] for token_id in token_ids]))

    @property
    def whole(self) -> bool:
        """Whether nothing is held back: what comes next is the text that it is by itself."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """What was held back, as it stands. Nothing may be pushed afterwards."""
        return self._decoder.decode(b"", final=True)
