"""POST /v1/chat/completions."""

from prfaas.errors import InvalidRequest
from prfaas.tokenizer.port import Message, Tokenizer
from services.router.openai.answer import AssistantMessage, ChatChoice, ChatChunkChoice, Delta
from services.router.openai.endpoint import Endpoint, check_length
from services.router.openai.logprobs import chat_logprobs
from services.router.openai.schema import ChatBody, ChatMessage


async def prompts(body: ChatBody, tokenizer: Tokenizer, max_tokens: int) -> list[bytes]:
    """Special tokens are the template's business, so encoding adds none."""
    text = tokenizer.render([to_template(message) for message in body.messages], tools=body.tools or ())
    check_length(tokenizer.fewest_tokens(text), max_tokens)
    return [await tokenizer.encode_aside(text, add_special_tokens=False)]


def to_template(message: ChatMessage) -> Message:
    """Templates know `system`, of which `developer` is the newer name, and text as one string."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join([part.text for part in content])
    seen = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return seen if message.name is None else {**seen, "name": message.name}


def max_tokens(body: ChatBody) -> int | None:
    """`max_tokens` is the older name of `max_completion_tokens`."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
    return body.max_completion_tokens or body.max_tokens


CHAT = Endpoint(
    name="chat",
    body=ChatBody,
    prompt_param="messages",
    count=lambda _: 1,
    prompts=prompts,
    echoes=lambda _body, _tokenizer, prompts: [""] * len(prompts),
    max_tokens=max_tokens,
    default_max_tokens=lambda settings: settings.chat_max_tokens,
    top_logprobs=lambda body: (body.top_logprobs or 0) if body.logprobs else None,
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    logprobs=chat_logprobs,
    whole=lambda index, text, finish, logprobs, token_ids: ChatChoice(
        index=index,
        message=AssistantMessage(text),
        finish_reason=finish,
        logprobs=logprobs,
        token_ids=token_ids,
    ),
    opening=lambda index, _: ChatChunkChoice(index=index, delta=Delta("assistant", "")),
    delta=lambda index, text, logprobs, token_ids: ChatChunkChoice(
        index=index, delta=Delta(content=text), logprobs=logprobs, token_ids=token_ids
    ),
    end=lambda index, finish: ChatChunkChoice(index=index, delta=Delta(), finish_reason=finish),
)
