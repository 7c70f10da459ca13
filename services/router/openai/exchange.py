"""One completion from the first token to the last byte, as one body or as a stream of chunks."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prfaas.tokenizer.port import Tokenizer
from services.router.http import sse
from services.router.openai.account import Account
from services.router.openai.answer import Envelope, TokenIds, Usage
from services.router.openai.endpoint import Endpoint
from services.router.openai.errors import log_unexpected, to_object
from services.router.openai.generation import Piece, Scored

ENCODER = msgspec.json.Encoder()
#: Stands for any text.
MARK = "\x00text\x00"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What the answer is made of. `echoes` has what each choice begins with."""

    endpoint: Endpoint[Any]
    account: Account
    tokenizer: Tokenizer
    echoes: Sequence[str]
    include_usage: bool = False
    continuous_usage: bool = False
    wants_token_ids: bool = False
    #: How many of the likeliest tokens to show; None: no probabilities.
    top_logprobs: int | None = None
    _opened: set[int] = field(default_factory=set)
    #: What stands around the choices of every chunk.
    _frame: tuple[bytes, bytes] = (b"", b"")

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> bytes:
        """The body. The time to the first token is until it is known here, as nothing is written before the last."""
        texts: list[list[str]] = [[echo] for echo in self.echoes]
        token_ids: list[list[int]] = [[] for _ in texts]
        scored: list[list[Scored]] = [[] for _ in texts]
        async with aclosing(pieces):
            async for piece in pieces:
                self.account.count(piece)
                self.account.first_token_out(piece.index)
                texts[piece.index].append(piece.text)
                token_ids[piece.index].extend(piece.token_ids)
                scored[piece.index].extend(piece.scored)
        assert self.account.finished, "the last piece of each choice has a finish reason"
        choices = [
            self.endpoint.whole(
                index,
                "".join(texts[index]),
                self.account.finishes[index],
                self._logprobs(scored[index]),
                self._token_ids(token_ids[index]),
            )
            for index in range(len(texts))
        ]
        receipt = self.account.receipt() if self.account.wants_receipt else msgspec.UNSET
        return self._encode(self.endpoint.whole_object, *choices, usage=self.account.usage(), receipt=receipt)

    async def stream(self, first: Piece, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Events, each batch of tokens at once. A failure is an event too: the status has been sent."""
        try:
            async with aclosing(pieces):
                self.account.count(first)
                end, last = self._end(first), first.index
                if events := self._opening(first.index) + self._delta(first) + (b"" if self.account.finished else end):
                    yield events
                    self.account.first_token_out(first.index)
                async for piece in pieces:
                    self.account.count(piece)
                    events, end, last = self._opening(piece.index) + self._delta(piece), self._end(piece), piece.index
                    if not self.account.finished:
                        events += end
                    if events:
                        yield events
                        self.account.first_token_out(piece.index)
            assert self.account.finished, "the last piece of each choice has a finish reason"
            self.account.first_token_out(last)
            yield end + self._tail() + sse.DONE
        except Exception as error:
            self.account.record.failed(error)
            log_unexpected(error, self.account.record.request_id)
            yield sse.event(ENCODER.encode(to_object(error)))

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._chunk(self.endpoint.opening(index, self.echoes[index]))

    def _delta(self, piece: Piece) -> bytes:
        """Tokens without text are shown only to who wants to see tokens."""
        shows_tokens = self.wants_token_ids or self.top_logprobs is not None
        if not piece.text and not (shows_tokens and piece.token_ids):
            return b""
        delta = self.endpoint.delta(
            piece.index, piece.text, self._logprobs(piece.scored), self._token_ids(piece.token_ids)
        )
        return self._chunk(delta)

    def _end(self, piece: Piece) -> bytes:
        return self._chunk(self.endpoint.end(piece.index, piece.finish)) if piece.finish is not None else b""

    def _token_ids(self, token_ids: Sequence[int]) -> TokenIds:
        return tuple(token_ids) if self.wants_token_ids else msgspec.UNSET

    def _logprobs(self, scored: Sequence[Scored]) -> Any:
        if self.top_logprobs is None:
            return None
        return self.endpoint.logprobs(scored, self.top_logprobs, self.tokenizer)

    @property
    def plain(self) -> bool:
        """Whether all chunks between the first and the end differ only in their text."""
        return len(self.echoes) == 1 and not (
            self.continuous_usage or self.wants_token_ids or self.top_logprobs is not None
        )

    def around_text(self) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of a text, in the event that adds it to the only choice."""
        before, after = self._chunk(self.endpoint.delta(0, MARK, None, msgspec.UNSET)).split(ENCODER.encode(MARK))
        return before, after

    def _chunk(self, choice: msgspec.Struct) -> bytes:
        """Only the choice differs from chunk to chunk, as long as the usage so far is not wanted in each."""
        if self.continuous_usage:
            return sse.event(self._encode(self.endpoint.chunk_object, choice, usage=self.account.usage()))
        if not self._frame[0]:
            usage = None if self.include_usage else msgspec.UNSET
            before, after = self._encode(self.endpoint.chunk_object, usage=usage).rsplit(b"[]", 1)
            self._frame = b"data: " + before + b"[", b"]" + after + b"\n\n"
        return self._frame[0] + sse.one_line(ENCODER.encode(choice)) + self._frame[1]

    def _tail(self) -> bytes:
        """Chunks without choices, on request: the usage, then the receipt."""
        tail = b""
        if self.include_usage:
            tail += sse.event(self._encode(self.endpoint.chunk_object, usage=self.account.usage()))
        if self.account.wants_receipt:
            tail += sse.event(self._encode(self.endpoint.chunk_object, receipt=self.account.receipt()))
        return tail

    def _encode(
        self,
        kind: str,
        *choices: msgspec.Struct,
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
        receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        request = self.account.requests[0]
        answer_id = self.endpoint.id_prefix + request.id
        return ENCODER.encode(Envelope(answer_id, kind, self.account.created, request.model, choices, usage, receipt))
