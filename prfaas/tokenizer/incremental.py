"""Text from tokens as they arrive.

Tokens do not end where characters end, and what a token decodes to may depend on the one before. So a short window of
tokens is decoded again with each arrival: some that have been shown, then some that have not. What the window says
beyond its shown part is new, unless it ends in U+FFFD: then the last character may be incomplete and is held back.

What must hold: the pieces together, with `flush`, are the text of all tokens; a character is never shown in parts;
the window stays short, whatever the tokens are, so that the cost is linear.
"""

from collections.abc import Iterable

from prfaas.tokenizer.port import Vocabulary

REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most 4 bytes and a token that shows at least one, so an older token cannot be incomplete.
CHARACTER_TOKENS = 4
#: Held-back tokens beyond which the window is cut. Only invalid bytes or real U+FFFD characters can get there.
MAX_HELD_TOKENS = 2 * CHARACTER_TOKENS


class IncrementalDetokenizer:
    """One sequence's way from tokens to text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final now. Tokens may arrive in batches of any size."""
        return "".join([self._push_one(token_id) for token_id in token_ids if self._vocabulary.has_text(token_id)])

    @property
    def whole(self) -> bool:
        """What a token says may always depend on the one before."""
        return False

    def flush(self) -> str:
        """What was held back, as it stands. Nothing may be pushed afterwards."""
        return self._vocabulary.decode(self._window)[len(self._shown_text) :]

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._vocabulary.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._show(text)
        if len(self._window) - self._shown > MAX_HELD_TOKENS:
            return self._cut(text)
        return ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        del self._window[: self._shown]
        self._shown = len(self._window)
        self._shown_text = self._vocabulary.decode(self._window)
        return new

    def _cut(self, text: str) -> str:
        """Show and forget everything up to the last border that splits no character and that no later byte can move."""
        newest = len(self._window) - CHARACTER_TOKENS
        for border in range(newest, newest - CHARACTER_TOKENS, -1):
            head = self._vocabulary.decode(self._window[:border])
            if head + self._vocabulary.decode(self._window[border:]) == text:
                break
        new = head[len(self._shown_text) :]
        del self._window[:border]
        self._shown, self._shown_text = 0, ""
        return new
