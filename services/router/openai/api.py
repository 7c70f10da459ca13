"""The OpenAI API as one handler: finds the route, keeps the record of the request, and turns errors into answers.

What must hold: whatever the input, the answer is one of the API's; each request is observed exactly once, when its last
byte is written or its client has left.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from prfaas.errors import ModelNotFound, Overloaded
from prfaas.flows.story import Story
from prfaas.tokenizer.port import Tokenizer
from services.router.http import sse
from services.router.http.errors import error_response
from services.router.http.messages import HttpRequest, Response, StreamingResponse
from services.router.openai.chat import CHAT
from services.router.openai.completions import COMPLETIONS
from services.router.openai.endpoint import Endpoint
from services.router.openai.errors import CLIENT_CLOSED_REQUEST, log_unexpected, to_response
from services.router.openai.exchange import Exchange
from services.router.openai.generation import TextAssembler, pieces
from services.router.openai.intake import make_request, stop_strings
from services.router.openai.port import Backend, ModelCard
from services.router.openai.record import Observe, RequestLog
from services.router.openai.schema import B, decode_body
from services.router.openai.settings import OpenAiSettings

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MODEL_PREFIX = "/v1/models/"


class OpenAiApi:
    """`now` is monotonic and the clock of `HttpRequest.received_s`; `wall` is Unix time; `new_seed` is random."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        settings: OpenAiSettings,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        new_seed: Callable[[], int],
        observe: Observe,
    ) -> None:
        self._backend, self._tokenizer, self._settings = backend, tokenizer, settings
        self._now, self._wall, self._new_seed, self._observe = now, wall, new_seed, observe

    async def handle(self, http: HttpRequest) -> Response | StreamingResponse:
        record = RequestLog(request_id=self._request_id(http), traceparent=_traceparent(http))
        try:
            response = await self._route(http, record)
        except asyncio.CancelledError:
            self._end(http, record, CLIENT_CLOSED_REQUEST)
            raise
        except Exception as error:
            record.failed(error)
            log_unexpected(error, record.request_id)
            response = to_response(error)
        if isinstance(response, StreamingResponse):
            response = replace(response, chunks=self._watched(response.chunks, http, record))
        else:
            self._end(http, record, response.status)
        return response.with_header("x-request-id", record.request_id)

    async def _watched(
        self, chunks: AsyncGenerator[bytes, None], http: HttpRequest, record: RequestLog
    ) -> AsyncGenerator[bytes, None]:
        status = CLIENT_CLOSED_REQUEST
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            status = 200
        finally:
            self._end(http, record, status)

    def _end(self, http: HttpRequest, record: RequestLog, status: int) -> None:
        record.status = status
        record.duration_s = self._now() - http.received_s
        self._observe(record)

    async def _route(self, http: HttpRequest, record: RequestLog) -> Response | StreamingResponse:
        match http.path:
            case "/v1/chat/completions":
                record.route = "chat"
                return _only(http, "POST") or await self._complete(CHAT, http, record)
            case "/v1/completions":
                record.route = "completions"
                return _only(http, "POST") or await self._complete(COMPLETIONS, http, record)
            case "/v1/models":
                record.route = "models"
                return _only(http, "GET", "HEAD") or self._models()
            case path if path.startswith(MODEL_PREFIX):
                record.route = "models"
                return _only(http, "GET", "HEAD") or _json(_card(self._card(path.removeprefix(MODEL_PREFIX))))
            case "/live":
                record.route = "live"
                return _only(http, "GET", "HEAD") or _json({"status": "live"})
            case "/ready" | "/health":
                record.route = "ready"
                return _only(http, "GET", "HEAD") or self._ready()
            case "/metrics":
                record.route = "metrics"
                return _only(http, "GET", "HEAD") or Response(200, self._backend.metrics_text(), PROMETHEUS_TEXT)
            case _:
                return error_response(404, f"There is no {http.path[:200]}", code="not_found")

    async def _complete(
        self, endpoint: Endpoint[B], http: HttpRequest, record: RequestLog
    ) -> Response | StreamingResponse:
        started_s = self._now()
        record.queue_s = started_s - http.received_s
        body = decode_body(http.body, endpoint.body)
        card = self._card(body.model)
        record.model, record.stream = card.id, bool(body.stream)
        record.completion_id = request_id = self._backend.new_request_id()
        request = await make_request(endpoint, body, card, self._tokenizer, self._settings, request_id, self._new_seed)
        record.prompt_tokens, record.tokenize_s = request.prompt_tokens, self._now() - started_s
        record.story = story = Story()
        options = body.stream_options
        exchange = Exchange(
            endpoint=endpoint,
            request=request,
            story=story,
            record=record,
            received_s=http.received_s,
            now=self._now,
            created=int(self._wall()),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            wants_token_ids=bool(body.return_token_ids),
            wants_receipt=http.headers.get("x-prfaas-receipt") == "1",
        )
        text = TextAssembler(self._tokenizer, stop_strings(body), request.sampling.stop_token_ids)
        answer = pieces(self._backend.complete(request, story), text)
        if not body.stream:
            return Response(200, await exchange.whole(answer))
        first = await anext(answer)  # until there is a token, a failure still has a status of its own
        return StreamingResponse(exchange.stream(first, answer), sse.CONTENT_TYPE, headers=sse.HEADERS)

    def _models(self) -> Response:
        return _json({"object": "list", "data": [_card(card) for card in self._backend.models()]})

    def _card(self, model: str) -> ModelCard:
        cards = self._backend.models()
        if not cards:  # a model that comes back must not look like one that never was
            raise Overloaded(self._backend.obstacle() or "no model is served")
        for card in cards:
            if card.id == model:
                return card
        raise ModelNotFound(model)

    def _ready(self) -> Response:
        if (obstacle := self._backend.obstacle()) is None:
            return _json({"status": "ready"})
        return error_response(503, f"Not ready: {obstacle}", retry_after_s=1.0)

    def _request_id(self, http: HttpRequest) -> str:
        """The caller's name for the request, if it is fit for a header and a log line, else one of ours."""
        given = http.headers.get("x-request-id", "")
        return given if REQUEST_ID.fullmatch(given) else self._backend.new_request_id()


def _traceparent(http: HttpRequest) -> str | None:
    given = http.headers.get("traceparent", "")
    return given if TRACEPARENT.fullmatch(given) else None


def _only(http: HttpRequest, *methods: str) -> Response | None:
    if http.method in methods:
        return None
    return error_response(405, f"{http.method} is not allowed here", headers=(("allow", ", ".join(methods)),))


def _json(value: Any) -> Response:
    return Response(200, msgspec.json.encode(value))


def _card(card: ModelCard) -> dict[str, Any]:
    """`max_model_len` is the name under which vLLM and its clients know the context length."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "prfaas",
        "max_model_len": card.max_context_tokens,
    }
