"""The answer of /v1/responses: one message with one text, as a whole or as the events of a stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from prfaas.request import FinishReason
from services.router.http import sse
from services.router.openai.account import Account
from services.router.openai.errors import log_unexpected, to_object
from services.router.openai.generation import Piece
from services.router.openai.responses import ResponsesBody, TextConfig, TextFormat

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True):
    text: str
    type: str = "output_text"
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(msgspec.Struct, frozen=True):
    id: str
    status: Status
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"
    type: str = "message"


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int
    model: str
    output: tuple[OutputMessage, ...] = ()
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    temperature: float
    tool_choice: str = "none"
    tools: tuple[()] = ()
    top_p: float
    truncation: str = "disabled"
    store: bool = False
    text: TextConfig = TextConfig(TextFormat())
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    prfaas_receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True, kw_only=True)
class ResponseExchange:
    """One sequence, of which `body` is what was asked."""

    body: ResponsesBody
    account: Account
    _number: int = 0

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> bytes:
        texts: list[str] = []
        async with aclosing(pieces):
            async for piece in pieces:
                self.account.count(piece)
                self.account.first_token_out(piece.index)
                texts.append(piece.text)
        return msgspec.json.encode(self._ended("".join(texts)))

    async def stream(self, first: Piece, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Each event has its type twice, around its data and in it, and a number; after the last there is no [DONE]."""
        text = ""
        try:
            async with aclosing(pieces):
                self.account.count(first)
                text += first.text
                yield self._opening() + self._delta(first)
                self.account.first_token_out(first.index)
                async for piece in pieces:
                    self.account.count(piece)
                    text += piece.text
                    if event := self._delta(piece):
                        yield event
            yield self._closing(text)
        except Exception as error:
            self.account.record.failed(error)
            log_unexpected(error, self.account.record.request_id)
            told = to_object(error)["error"]
            failed = ResponseError(told["code"] or told["type"], told["message"])
            yield self._event("response.failed", response=self._response("failed", error=failed))

    def _opening(self) -> bytes:
        begun = self._response("in_progress")
        item = OutputMessage(self._item_id, "in_progress")
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._in_text("response.content_part.added", part=OutputText(""))
        )

    def _delta(self, piece: Piece) -> bytes:
        return self._in_text("response.output_text.delta", delta=piece.text, logprobs=()) if piece.text else b""

    def _closing(self, text: str) -> bytes:
        ended = self._ended(text)
        return (
            self._in_text("response.output_text.done", text=text, logprobs=())
            + self._in_text("response.content_part.done", part=OutputText(text))
            + self._event("response.output_item.done", output_index=0, item=ended.output[0])
            + self._event(f"response.{ended.status}", response=ended)
        )

    def _in_text(self, kind: str, **facts: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **facts})
        self._number += 1
        return b"event: %b\n%b" % (kind.encode(), sse.event(body))

    @property
    def _item_id(self) -> str:
        return f"msg_{self.account.requests[0].id}"

    def _ended(self, text: str) -> ResponseObject:
        cut = self.account.finishes[0] is FinishReason.LENGTH
        status: Status = "incomplete" if cut else "completed"
        return self._response(
            status,
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=(OutputMessage(self._item_id, status, (OutputText(text),)),),
            usage=self._usage(),
            prfaas_receipt=self.account.receipt() if self.account.wants_receipt else msgspec.UNSET,
        )

    def _response(self, status: Status, **facts: Any) -> ResponseObject:
        [request] = self.account.requests
        return ResponseObject(
            id=f"resp_{request.id}",
            created_at=self.account.created,
            status=status,
            instructions=self.body.instructions,
            max_output_tokens=request.sampling.max_tokens,
            model=request.model,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            user=self.body.user,
            metadata=self.body.metadata or {},
            **facts,
        )

    def _usage(self) -> ResponseUsage:
        usage = self.account.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(),
            usage.total_tokens,
        )
