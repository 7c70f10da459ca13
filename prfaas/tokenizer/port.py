"""What the router needs of a tokenizer. Token ids travel packed as little-endian uint32 (`Request.prompt`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

#: A chat message as templates see it: `role`, `content` and perhaps `name`.
Message = Mapping[str, str]


class Vocabulary(Protocol):
    """The way back from token ids to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens. Bytes that are no valid UTF-8 become U+FFFD."""
        ...

    def has_text(self, token_id: int) -> bool:
        """Whether the id shows in decoded text: known, and not special."""
        ...


class Tokenizer(Vocabulary, Protocol):
    """Text to tokens and back. Text must be valid Unicode, without halves of surrogate pairs."""

    @property
    def vocabulary_size(self) -> int: ...

    def render(self, messages: Sequence[Message]) -> str:
        """The messages as one prompt, up to the answer; InvalidRequest if the template refuses them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes: ...

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Like `encode`, but long texts do not hold up the event loop."""
        ...
