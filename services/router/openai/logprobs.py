"""Probabilities of tokens in the two forms of the OpenAI API.

They are the model's own, at temperature 1. A token whose bytes are no text by themselves is shown by its bytes, so that
different tokens look different.
"""

from collections.abc import Sequence

from prfaas.tokenizer.port import Tokenizer
from services.router.openai.answer import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from services.router.openai.generation import Scored

#: What stands for impossible: JSON has no infinity.
LOWEST = -9999.0


def chat_logprobs(scored: Sequence[Scored], count: int, tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(tuple(_token(each, count, tokenizer) for each in scored))


def text_logprobs(scored: Sequence[Scored], count: int, tokenizer: Tokenizer) -> TextLogprobs:
    """Of each token the `count` likeliest, and the token itself if it is not among them."""
    top = [
        {
            shown(token_id, tokenizer, "bytes:"): max(logprob, LOWEST)
            for token_id, logprob in reversed(_best(each, count))
        }
        for each in scored
    ]
    return TextLogprobs(
        text_offset=tuple(each.offset for each in scored),
        token_logprobs=tuple(max(each.logprob, LOWEST) for each in scored),
        tokens=tuple(shown(each.token_id, tokenizer, "bytes:") for each in scored),
        top_logprobs=tuple(dict(reversed(each.items())) for each in top),
    )


def _token(each: Scored, count: int, tokenizer: Tokenizer) -> TokenLogprob:
    top = tuple(TopLogprob(*_named(token_id, logprob, tokenizer)) for token_id, logprob in each.best[:count])
    return TokenLogprob(*_named(each.token_id, each.logprob, tokenizer), top)


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, tuple[int, ...]]:
    return shown(token_id, tokenizer), max(logprob, LOWEST), tuple(tokenizer.token_bytes(token_id))


def _best(each: Scored, count: int) -> tuple[tuple[int, float], ...]:
    best = each.best[:count]
    return best if any(token_id == each.token_id for token_id, _ in best) else (*best, (each.token_id, each.logprob))


def shown(token_id: int, tokenizer: Tokenizer, prefix: str = "") -> str:
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)
