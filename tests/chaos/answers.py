"""What came of a request, and where it differs from what it must be: pure."""

from dataclasses import dataclass, field
from typing import Any

from tests.chaos.asked import Asked


@dataclass
class Got:
    """Of one request so far, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    pieces: int = 0

    def add(self, answer: Any) -> None:
        """A chunk of a stream, or an answer that came as a whole."""
        self.pieces += 1
        for choice in answer.choices:
            self.text[choice.index] = self.text.get(choice.index, "") + choice.text
            self.tokens.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids") or ())
            if choice.finish_reason:
                self.finish[choice.index] = choice.finish_reason
        self.receipt = (answer.model_extra or {}).get("prfaas_receipt") or self.receipt


def differences(asked: Asked, got: Got, whole: bool) -> list[str]:
    """In words. Of an answer that is not `whole` there may be less, but nothing else."""
    found = []
    for index, expected in enumerate(asked.expected):
        text, tokens = got.text.get(index, ""), tuple(got.tokens.get(index, ()))
        right = tokens == expected.tokens[: len(tokens)] and expected.text.startswith(text)
        if whole:
            right &= text == expected.text and got.finish.get(index) == asked.finish
            # Where it stops at a string, the reference goes on.
            right &= tokens == expected.tokens or asked.stop is not None or not asked.shows_tokens
        if not right:
            found.append(
                f"{asked.name}, choice {index}: {tokens} {text!r} {got.finish.get(index)}, not {expected.tokens}"
                f" {expected.text!r}; receipt {got.receipt}"
            )
    return found
