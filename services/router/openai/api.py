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

from prfaas.observe.tracing import NO_TRACING, Tracing, valid_traceparent
from prfaas.tokenizer.port import Tokenizer
from services.router.admission_port import AdmissionPort, Caller
from services.router.http.errors import error_response
from services.router.http.messages import HttpRequest, Response, StreamingResponse
from services.router.openai import spans
from services.router.openai.catalogue import Catalogue
from services.router.openai.chat import CHAT
from services.router.openai.completing import Completing
from services.router.openai.completions import COMPLETIONS
from services.router.openai.document import WITHOUT_KEY, openapi_json
from services.router.openai.errors import CLIENT_CLOSED_REQUEST, log_unexpected, to_response
from services.router.openai.port import Backend
from services.router.openai.record import Observe, RequestLog
from services.router.openai.schema import decode_body
from services.router.openai.settings import OpenAiSettings
from services.router.openai.shortcut import Spellings
from services.router.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MODEL_PREFIX = "/v1/models/"


class OpenAiApi:
    """`now` is monotonic and the clock of `HttpRequest.received_s`; `wall` is Unix time; `new_seed` is random."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        settings: OpenAiSettings,
        admission: AdmissionPort,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        new_seed: Callable[[], int],
        observe: Observe,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._backend, self._tokenizer, self._admission = backend, tokenizer, admission
        self._now, self._observe = now, observe
        self._catalogue = Catalogue(backend, admission)
        self._completing = Completing(
            backend=backend,
            catalogue=self._catalogue,
            tokenizer=tokenizer,
            settings=settings,
            admission=admission,
            now=now,
            wall=wall,
            new_seed=new_seed,
            tracing=tracing,
            spellings=Spellings(tokenizer.bytes_of),
        )

    def refused_by_head(self, http: HttpRequest) -> bool:
        """Without a key that is known: what such a client sends need not be waited for, nor held."""
        return http.path not in WITHOUT_KEY and not self._admission.known(http.headers)

    async def handle(self, http: HttpRequest) -> Response | StreamingResponse:
        record = RequestLog(request_id=self._request_id(http), traceparent=_traceparent(http))
        try:
            response = await self._route(http, record)
        except asyncio.CancelledError:
            self._end(http.received_s, record, CLIENT_CLOSED_REQUEST)
            raise
        except Exception as error:
            record.failed(error)
            log_unexpected(error, record.request_id)
            response = to_response(error)
        if isinstance(response, StreamingResponse):
            response = replace(response, chunks=self._watched(response.chunks, http.received_s, record))
        else:
            self._end(http.received_s, record, response.status)
        return response.with_header("x-request-id", record.request_id)

    async def _watched(
        self, chunks: AsyncGenerator[bytes, None], received_s: float, record: RequestLog
    ) -> AsyncGenerator[bytes, None]:
        """It must not hold the request: a body is long, and a stream may be too."""
        status = CLIENT_CLOSED_REQUEST
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            status = 200
        finally:
            self._end(received_s, record, status)

    def _end(self, received_s: float, record: RequestLog, status: int) -> None:
        record.status = status
        record.duration_s = self._now() - received_s
        spans.end(record)
        self._observe(record)

    async def _route(self, http: HttpRequest, record: RequestLog) -> Response | StreamingResponse:
        caller = Caller() if http.path in WITHOUT_KEY else self._admission.caller(http.headers)
        record.tenant = caller.tenant
        match http.path:
            case "/v1/chat/completions":
                record.route = "chat"
                return _only(http, "POST") or await self._completing.complete(CHAT, http, record, caller)
            case "/v1/completions":
                record.route = "completions"
                return _only(http, "POST") or await self._completing.complete(COMPLETIONS, http, record, caller)
            case "/v1/responses":
                record.route = "responses"
                return _only(http, "POST") or await self._completing.respond(http, record, caller)
            case "/tokenize":
                record.route = "tokenize"
                return _only(http, "POST") or await self._tokenize(http, caller)
            case "/detokenize":
                record.route = "detokenize"
                return _only(http, "POST") or self._detokenize(http, caller)
            case "/openapi.json":
                record.route = "openapi"
                return _only(http, "GET", "HEAD") or Response(200, openapi_json(self._admission.needs_key))
            case "/v1/models":
                record.route = "models"
                return _only(http, "GET", "HEAD") or _json(self._catalogue.list(caller))
            case path if path.startswith(MODEL_PREFIX):
                record.route = "models"
                return _only(http, "GET", "HEAD") or _json(
                    self._catalogue.model(path.removeprefix(MODEL_PREFIX), caller)
                )
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

    async def _tokenize(self, http: HttpRequest, caller: Caller) -> Response:
        body = decode_body(http.body, TokenizeBody)
        return _json(await tokenize(body, self._catalogue.card(body.model, caller), self._tokenizer))

    def _detokenize(self, http: HttpRequest, caller: Caller) -> Response:
        body = decode_body(http.body, DetokenizeBody)
        return _json(detokenize(body, self._catalogue.card(body.model, caller), self._tokenizer))

    def _ready(self) -> Response:
        if (obstacle := self._backend.obstacle()) is None:
            return _json({"status": "ready"})
        return error_response(503, f"Not ready: {obstacle}", retry_after_s=1.0)

    def _request_id(self, http: HttpRequest) -> str:
        """The caller's name for the request, if it is fit for a header and a log line, else one of ours."""
        given = http.headers.get("x-request-id", "")
        return given if REQUEST_ID.fullmatch(given) else self._backend.new_request_id()


def _traceparent(http: HttpRequest) -> str | None:
    given = http.headers.get("traceparent")
    return given if given is not None and valid_traceparent(given) else None


def _only(http: HttpRequest, *methods: str) -> Response | None:
    if http.method in methods:
        return None
    return error_response(405, f"{http.method} is not allowed here", headers=(("allow", ", ".join(methods)),))


def _json(value: Any) -> Response:
    return Response(200, msgspec.json.encode(value))
