"""What the router needs of a tokenizer. Token ids travel packed as little-endian uint32 (`Request.prompt`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

#: A chat message as templates see it: `role`, `content` and perhaps `name`.
Message = Mapping[str, str]
#: A tool as the OpenAI API describes it; templates write it into the prompt.
Tool = Mapping[str, Any]


class Vocabulary(Protocol):
    """The way back from token ids to text."""

    @property
    def bytes_of(self) -> Mapping[int, bytes] | None:
        """The bytes of every id, where a text is just those of its tokens in a row, in UTF-8; ids without text are
        empty. None where it is not."""
        ...

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

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        """The messages as one prompt, up to the answer; InvalidRequest if the template refuses them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes: ...

    def fewest_tokens(self, text: str) -> int:
        """That `encode` might make of it, told at once: it never makes fewer. 0 where that is not known."""
        ...

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Like `encode`, but long texts do not hold up the event loop."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Like `decode`, with the special tokens as they are written."""
        ...

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an id that it does not know."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, in UTF-8. It may begin or end within a character."""
        ...
