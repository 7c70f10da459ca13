"""One completion from the first token to the last byte, as one body or as a stream of chunks."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from prfaas.flows.story import Story
from prfaas.request import FinishReason, Request
from services.router.http import sse
from services.router.openai.answer import Envelope, PromptDetails, TokenIds, Usage
from services.router.openai.endpoint import Endpoint
from services.router.openai.errors import log_unexpected, to_object
from services.router.openai.generation import Piece
from services.router.openai.receipt import account, receipt
from services.router.openai.record import RequestLog


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What the answer is made of. `record` is written as things happen."""

    endpoint: Endpoint[Any]
    request: Request
    story: Story
    record: RequestLog
    #: Monotonic time at which the request had been parsed off the socket.
    received_s: float
    now: Callable[[], float]
    #: Unix seconds.
    created: int
    include_usage: bool
    continuous_usage: bool
    wants_token_ids: bool
    wants_receipt: bool

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> bytes:
        """The body. The time to the first token is until it is known here, as nothing is written before the last."""
        texts: list[str] = []
        token_ids: list[int] = []
        async with aclosing(pieces):
            async for piece in pieces:
                self._count(piece)
                self._first_token_out()
                texts.append(piece.text)
                token_ids.extend(piece.token_ids)
        return self._encode(
            self.endpoint.whole_object,
            self.endpoint.whole("".join(texts), self._finish(), self._token_ids(token_ids)),
            usage=self._usage(),
            receipt=self._receipt() if self.wants_receipt else msgspec.UNSET,
        )

    async def stream(self, first: Piece, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Events, each batch of tokens at once. A failure is an event too: the status has been sent."""
        try:
            async with aclosing(pieces):
                self._count(first)
                yield self._chunk(self.endpoint.opening) + self._delta(first)
                self._first_token_out()
                async for piece in pieces:
                    self._count(piece)
                    if delta := self._delta(piece):
                        yield delta
            yield self._chunk(self.endpoint.end(self._finish())) + self._tail() + sse.DONE
        except Exception as error:
            self.record.failed(error)
            log_unexpected(error, self.record.request_id)
            yield sse.event(msgspec.json.encode(to_object(error)))

    def _first_token_out(self) -> None:
        if self.record.ttft_s is None:
            self.record.ttft_s = self.now() - self.received_s

    def _count(self, piece: Piece) -> None:
        self.record.output_tokens += len(piece.token_ids)
        self.record.finish = piece.finish

    def _finish(self) -> FinishReason:
        assert self.record.finish is not None, "the last piece has a finish reason"
        return self.record.finish

    def _delta(self, piece: Piece) -> bytes:
        if not piece.text and not self.wants_token_ids:
            return b""
        return self._chunk(self.endpoint.delta(piece.text, self._token_ids(piece.token_ids)))

    def _token_ids(self, token_ids: Sequence[int]) -> TokenIds:
        return tuple(token_ids) if self.wants_token_ids else msgspec.UNSET

    def _chunk(self, *choices: msgspec.Struct) -> bytes:
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
        if self.include_usage or self.continuous_usage:
            usage = self._usage() if self.continuous_usage else None
        return sse.event(self._encode(self.endpoint.chunk_object, *choices, usage=usage))

    def _tail(self) -> bytes:
        """Chunks without choices, on request: the usage, then the receipt."""
        tail = b""
        if self.include_usage:
            tail += sse.event(self._encode(self.endpoint.chunk_object, usage=self._usage()))
        if self.wants_receipt:
            tail += sse.event(self._encode(self.endpoint.chunk_object, receipt=self._receipt()))
        return tail

    def _encode(
        self,
        kind: str,
        *choices: msgspec.Struct,
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
        receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        answer_id = self.endpoint.id_prefix + self.request.id
        return msgspec.json.encode(Envelope(answer_id, kind, self.created, self.request.model, choices, usage, receipt))

    def _usage(self) -> Usage:
        prompt_tokens, output_tokens = self.request.prompt_tokens, self.record.output_tokens
        cached = self.story.prefill.cached_tokens if self.story.prefill is not None else 0
        total = prompt_tokens + output_tokens
        return Usage(prompt_tokens, output_tokens, total, PromptDetails(min(cached, prompt_tokens)))

    def _receipt(self) -> dict[str, Any]:
        record = self.record
        ttft = account(self.story, record.queue_s or 0.0, record.tokenize_s or 0.0, record.ttft_s or 0.0)
        return receipt(self.request, self.story, record.output_tokens, ttft)
