"""POST /v1/chat/completions."""

from prfaas.errors import InvalidRequest
from prfaas.tokenizer.port import Message, Tokenizer
from services.router.openai.answer import AssistantMessage, ChatChoice, ChatChunkChoice, Delta
from services.router.openai.endpoint import Endpoint
from services.router.openai.schema import ChatBody, ChatMessage


async def prompt(body: ChatBody, tokenizer: Tokenizer) -> bytes:
    """Special tokens are the template's business, so encoding adds none."""
    text = tokenizer.render([to_template(message) for message in body.messages])
    return await tokenizer.encode_aside(text, add_special_tokens=False)


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
    prompt=prompt,
    max_tokens=max_tokens,
    default_max_tokens=lambda settings: settings.chat_max_tokens,
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole=lambda text, finish, token_ids: ChatChoice(AssistantMessage(text), finish, token_ids),
    opening=ChatChunkChoice(Delta("assistant", "")),
    delta=lambda text, token_ids: ChatChunkChoice(Delta(content=text), token_ids=token_ids),
    end=lambda finish: ChatChunkChoice(Delta(), finish),
)
