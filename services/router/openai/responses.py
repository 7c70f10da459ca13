"""POST /v1/responses, as far as it is text: a chat in other words. Nothing is stored that could be gone back to."""

from typing import Annotated, Any, Literal

import msgspec

from prfaas.errors import InvalidRequest
from services.router.openai.schema import ChatBody, ChatMessage, Positive, Stops, Temperature, TextPart, TopP

#: Fields of the body that a chat knows under another name, for errors.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}


class InputText(msgspec.Struct, forbid_unknown_fields=True):
    """The fields after `text` come with what clients send back of earlier answers."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Likewise `id` and `status`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], msgspec.Meta(min_length=1)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"] = "text"


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    #: Like the next, of vLLM, for load generators: where the answer ends.
    stop: Stops | None = None
    ignore_eos: bool | None = None
    # Without effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    # For engines that can; as in a chat, but in another form, which no engine here takes.
    tools: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    # Not served.
    background: bool | None = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: None = None
    reasoning: Any = None
    service_tier: str | None = None
    store: bool | None = None
    top_logprobs: Literal[0] | None = None
    truncation: str | None = None


def to_chat(body: ResponsesBody) -> ChatBody:
    """The chat that asks for the same. What is refused of it is refused by the name that it has here."""
    messages = [ChatMessage("system", body.instructions)] if body.instructions is not None else []
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        messages += [ChatMessage(item.role, _content(item)) for item in body.input]
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
    )


def _content(item: InputMessage) -> str | list[TextPart]:
    if isinstance(item.content, str):
        return item.content
    return [TextPart("text", part.text) for part in item.content]


def in_the_words_of_responses(error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(error.message, param=NAMES.get(error.param or "", error.param), code=error.code)
