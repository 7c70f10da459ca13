"""What one completion has come to so far: tokens, ends, the time to the first token. Usage and receipt are drawn from
it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.flows.story import Story
from prfaas.request import FinishReason, Request, TtftAccount
from services.router.openai.answer import PromptDetails, Usage
from services.router.openai.generation import Piece
from services.router.openai.receipt import account, receipt
from services.router.openai.record import RequestLog


@dataclass(slots=True, kw_only=True)
class Account:
    """Of all `requests` of one body, `choices` for each prompt, with one of `stories` each. `record` is written as
    things happen."""

    requests: Sequence[Request]
    stories: Sequence[Story]
    choices: int
    record: RequestLog
    #: Monotonic time at which the request had been parsed off the socket.
    received_s: float
    now: Callable[[], float]
    #: Unix seconds.
    created: int
    wants_receipt: bool = False
    finishes: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.finishes) == len(self.requests)

    def count(self, piece: Piece) -> None:
        self.record.output_tokens += len(piece.token_ids)
        if piece.finish is not None:
            self.finishes[piece.index] = self.record.finish = piece.finish

    def first_token_out(self, index: int) -> None:
        """The first byte of a token has been handed to the socket, or is known where nothing is sent before the last;
        it is of the sequence with this index. Only the first time counts."""
        record = self.record
        if record.ttft_s is None:
            now_s = self.now()
            record.ttft_s = now_s - self.received_s
            record.account = account(self.stories[index], record, now_s)

    @property
    def prompts(self) -> list[bytes]:
        return [request.prompt for request in self.requests[:: self.choices]]

    @property
    def prompt_tokens(self) -> int:
        return sum([request.prompt_tokens for request in self.requests[:: self.choices]])

    @property
    def cached_tokens(self) -> int:
        """Of each prompt, as its first sequence found it."""
        firsts = zip(self.requests[:: self.choices], self.stories[:: self.choices], strict=True)
        return sum(
            [min(story.prefill.cached_tokens, request.prompt_tokens) for request, story in firsts if story.prefill]
        )

    def usage(self) -> Usage:
        prompt_tokens, output_tokens = self.prompt_tokens, self.record.output_tokens
        return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptDetails(self.cached_tokens))

    def receipt(self) -> dict[str, Any]:
        """That of the first sequence, and what is shorter to tell of all."""
        record = self.record
        return receipt(self.requests[0], self.stories[0], record.output_tokens, record.account or TtftAccount())
