"""The OpenAPI document. Its schemas are those that bodies are decoded and answers encoded with, so that it cannot say
anything else than what is served; its errors are those that the HTTP front and the API have.

It is of OpenAPI 3.2, the first that can say what the events of a stream are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from prfaas.scheduling.turns import Priority
from prfaas.version import VERSION
from services.router.openai.answer import ChatChoice, ChatChunkChoice, Envelope, TextChoice
from services.router.openai.catalogue import Model, ModelList
from services.router.openai.response_answer import ResponseObject
from services.router.openai.responses import ResponsesBody
from services.router.openai.schema import NEUTRAL, ChatBody, CompletionBody
from services.router.openai.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

PLACE = "#/components/schemas/{name}"


class ErrorFacts(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorFacts


class ResponseEvent(msgspec.Struct, frozen=True):
    """Of /v1/responses. What else there is depends on its type."""

    type: str
    sequence_number: int


class Status(msgspec.Struct, frozen=True):
    status: str


#: What each means here.
ERRORS = {
    400: "It cannot be served as written; `param` is the field or header that is to blame",
    401: "No API key, or one that is not known",
    403: "The API key is not good for this model",
    404: "There is no such model",
    408: "It did not arrive in time",
    413: "The body is too large",
    417: "Only `Expect: 100-continue` is understood",
    429: "A limit of the tenant's is used up",
    431: "The headers are too many or too large",
    500: "Our fault",
    501: "Only the transfer encoding `chunked` is understood",
    503: "There is no room now, or nobody to serve it",
    504: "The deadline for the first token has passed or cannot be kept",
    505: "Only HTTP/1.0 and HTTP/1.1 are understood",
}
#: Whatever is asked: the front, which says so before it is known what it is, and faults of ours.
ALWAYS = (400, 408, 413, 417, 431, 500, 501, 503, 505)
WITH_KEY = (401,)
OF_MODEL = (401, 403, 404)
OF_TOKENS = (401, 403, 404, 429, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """`errors` are those beside the ones that are always possible; `chunk` is what one event of a stream holds, when
    the answer can be one."""

    method: str
    path: str
    summary: str
    answer: Any
    errors: Sequence[int] = ()
    body: Any = None
    chunk: Any = None

    @property
    def kinds(self) -> tuple[Any, Any, Any]:
        return self.body, self.answer, self.chunk


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat",
        Envelope[ChatChoice],
        OF_TOKENS,
        ChatBody,
        Envelope[ChatChunkChoice],
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts",
        Envelope[TextChoice],
        OF_TOKENS,
        CompletionBody,
        Envelope[TextChoice],
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a chat, with typed events",
        ResponseObject,
        OF_TOKENS,
        ResponsesBody,
        ResponseEvent,
    ),
    Operation("post", "/tokenize", "The tokens of a prompt", Tokenized, OF_MODEL, TokenizeBody),
    Operation("post", "/detokenize", "The text of tokens", Detokenized, OF_MODEL, DetokenizeBody),
    Operation("get", "/v1/models", "The models that are served", ModelList, WITH_KEY),
    Operation("get", "/v1/models/{model}", "One of them", Model, OF_MODEL),
    Operation("get", "/live", "Whether the process works", Status),
    Operation("get", "/ready", "Whether requests can be served", Status),
    Operation("get", "/health", "The same as /ready", Status),
    Operation("get", "/metrics", "Metrics in the text format of Prometheus", str),
    Operation("get", "/openapi.json", "This document", dict[str, Any]),
)
#: Where nobody is asked for a key: probes and scrapers have none.
WITHOUT_KEY = frozenset({"/live", "/ready", "/health", "/metrics", "/openapi.json"})

HEADERS: dict[str, Any] = {
    "x-request-id": {"description": "The caller's, or one made here", "schema": {"type": "string"}},
    "retry-after": {
        "description": "Seconds after which it makes sense to come back",
        "schema": {"type": "integer", "minimum": 1},
    },
    "www-authenticate": {"description": "How to show a key", "schema": {"const": "Bearer"}},
    "cache-control": {"description": "Of a stream", "schema": {"const": "no-cache"}},
    "x-accel-buffering": {"description": "Of a stream", "schema": {"const": "no"}},
}
PARAMETERS: dict[str, Any] = {
    "x-request-id": {"description": "The caller's name for the request", "schema": {"type": "string"}},
    "traceparent": {"description": "W3C trace context", "schema": {"type": "string"}},
    "x-prfaas-priority": {
        "description": "No better than the key's",
        "schema": {"enum": [priority.value for priority in Priority]},
    },
    "x-prfaas-ttft-deadline-ms": {
        "description": "For the first token",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10**9},
    },
    "x-prfaas-receipt": {"description": "1: with a decision receipt", "schema": {"type": "string"}},
}
TRACED = ("x-request-id", "traceparent")
ADMITTED = (*TRACED, "x-prfaas-priority", "x-prfaas-ttft-deadline-ms")


@cache
def openapi_json(needs_key: bool) -> bytes:
    return msgspec.json.encode(openapi(needs_key))


def openapi(needs_key: bool) -> dict[str, Any]:
    """`needs_key`: whether requests without an API key are refused."""
    kinds = [kind for each in OPERATIONS for kind in each.kinds if kind is not None]
    kinds.append(ErrorAnswer)
    shown, schemas = msgspec.json.schema_components(kinds, ref_template=PLACE)
    remaining = iter(shown)
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        body, answer, chunk = (
            next(remaining) if kind is not None else None for kind in (each.body, each.answer, each.chunk)
        )
        paths.setdefault(each.path, {})[each.method] = _operation(each, body, answer, chunk)
    for schema in schemas.values():
        _show_what_is_served(schema)
    return {
        "openapi": "3.2.0",
        "info": {"title": "prfaas router", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in ERRORS},
            "headers": HEADERS,
            "parameters": {name: {"name": name, "in": "header", **facts} for name, facts in PARAMETERS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if needs_key else [{}],
    }


def _operation(each: Operation, body: Any, answer: Any, chunk: Any) -> dict[str, Any]:
    errors = sorted({*ALWAYS, *each.errors})
    described: dict[str, Any] = {
        "operationId": f"{each.method}{each.path}".translate(str.maketrans("/.{}", "____")),
        "summary": each.summary,
        "parameters": _parameters(each),
        "responses": {
            "200": _success(each, answer, chunk),
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in errors},
        },
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if each.path in WITHOUT_KEY:
        described["security"] = []
    return described


def _parameters(each: Operation) -> list[dict[str, Any]]:
    names = TRACED if each.path in WITHOUT_KEY else ADMITTED
    names = (*names, "x-prfaas-receipt") if each.chunk is not None else names
    parameters: list[dict[str, Any]] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    if "{model}" in each.path:
        parameters.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string"}})
    return parameters


def _success(each: Operation, answer: Any, chunk: Any) -> dict[str, Any]:
    headers = {"x-request-id": {"required": True, **HEADERS["x-request-id"]}}
    content = {"text/plain" if each.answer is str else "application/json": {"schema": answer}}
    if chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event(chunk)}
        headers |= {name: _header(name) for name in ("cache-control", "x-accel-buffering")}
    return {"description": "The answer", "headers": headers, "content": content}


def _event(chunk: Any) -> dict[str, Any]:
    """A stream may also end with an error, and those of chunks end with [DONE]."""
    told = {"anyOf": [chunk, {"$ref": PLACE.format(name=ErrorAnswer.__name__)}]}
    data = {
        "type": "string",
        "anyOf": [{"contentMediaType": "application/json", "contentSchema": told}, {"const": "[DONE]"}],
    }
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _error(status: int) -> dict[str, Any]:
    """The front answers without an id what it cannot take for a request."""
    headers: dict[str, Any] = {"x-request-id": _header("x-request-id")}
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["retry-after"] = {"required": True, **HEADERS["retry-after"]}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = {"required": True, **HEADERS["www-authenticate"]}
    schema = {"$ref": PLACE.format(name=ErrorAnswer.__name__)}
    return {"description": ERRORS[status], "headers": headers, "content": {"application/json": {"schema": schema}}}


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def _show_what_is_served(schema: dict[str, Any]) -> None:
    """Fields that are there only to be refused may say nothing but what asks for nothing."""
    if schema.get("additionalProperties") is False:  # a body
        for name, neutral in NEUTRAL.items():
            if name in schema["properties"]:
                schema["properties"][name] = {"enum": [None, *neutral], "default": None}
