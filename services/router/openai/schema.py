"""Request bodies, typed. What a field cannot mean here is refused with its name, never ignored.

Fields of the OpenAI API that are not served are listed all the same: a client may send them with a value that asks for
nothing (`NEUTRAL`). What only some engines can do is judged where the engine is known.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from prfaas.engine.port import TOP_LOGITS
from prfaas.errors import InvalidRequest

MAX_STOPS = 4
#: As the OpenAI API has it. The router's own limit is `OpenAiSettings.max_sequences`.
MAX_CHOICES = 128

Positive = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGITS)]
#: Looked for in the answer while it comes; a long one costs the event loop time.
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    #: As vLLM and load generators know it: usage so far in each chunk.
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common."""

    model: str
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    store: bool | None = None
    # Not served; of vLLM, whose load generator and clients send them along.
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None


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
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    # For engines that can.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # Without effect on the answer.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Not served.
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    modalities: Any = None
    service_tier: str | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    #: How many of the most likely tokens to show beside each.
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    # Not served.
    best_of: int | None = None
    suffix: str | None = None


#: What a field that is not served may say, beside null.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "store": (False,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "repetition_penalty": (1.0,),
    "top_k": (0, -1),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "previous_response_id": (),
    "conversation": (),
    "reasoning": ({},),
    "continue_final_message": (False,),
}

B = TypeVar("B", bound=Body)
S = TypeVar("S", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[S]) -> S:
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
    if isinstance(decoded, Body):
        _check_combination(decoded)
    return decoded


def _check_combination(body: Body) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    match body:
        case ChatBody() if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        case CompletionBody() if body.echo and body.logprobs is not None:
            raise InvalidRequest("logprobs of the prompt are not supported: echo excludes logprobs", param="logprobs")


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
