"""Request bodies, typed. What a field cannot mean here is refused with its name, never ignored.

Fields of the OpenAI API that are not served are listed all the same: a client may send them with a value that asks for
nothing (`NEUTRAL`).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from prfaas.errors import InvalidRequest

MAX_STOPS = 4

Positive = Annotated[int, msgspec.Meta(ge=1)]
#: Looked for in the answer while it comes; a long one costs the event loop time.
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    #: As vLLM and load generators know it: usage so far in each chunk.
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common."""

    model: str
    max_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: A vLLM extension that load generators use: go on to `max_tokens`.
    ignore_eos: bool | None = None
    #: Likewise: `token_ids` beside the text.
    return_token_ids: bool | None = None
    # Without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Not served.
    n: int | None = None
    logprobs: bool | int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    store: bool | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of type None are in what clients send back of earlier answers."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], msgspec.Meta(min_length=1)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    # Not served.
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    modalities: Any = None
    service_tier: str | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    # Not served.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


#: What a field that is not served may say, beside null.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "store": (False,),
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

B = TypeVar("B", bound=Body)


def decode_body(body: bytes, kind: type[B]) -> B:
    """The body, or InvalidRequest with the field that is wrong."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    for name, neutral in NEUTRAL.items():
        value = getattr(decoded, name, None)
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise InvalidRequest(f"{name} is not supported with this value", param=name)
    if decoded.stream_options is not None and not decoded.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return decoded


#: msgspec says what and where: "Expected `int`, got `str` - at `$.max_tokens`".
PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL)
#: The name of such a field is not part of the place.
NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def _invalid(message: str) -> InvalidRequest:
    """`param` is the field of the body; the message says where in it."""
    place = PLACE.fullmatch(message)
    assert place is not None
    what, where = place["what"], place["where"] or ""
    if named := NAMED.fullmatch(what):
        where = f"{where}.{named['name']}".lstrip(".")
    param = re.split(r"[.\[]", where, maxsplit=1)[0] if place["where"] else where
    return InvalidRequest(f"{where or 'body'}: {what}", param=param or None)
