"""What a vLLM server says of the tokens that it draws, as an engine says it.

It gives logarithms of probabilities, at temperature 1: such a logit has a normaliser of 1, whose logarithm is 0.
"""

from typing import Any

import msgspec

from prfaas.request import Score

#: How the server writes a token where its text would not tell tokens apart.
TOKEN = "token_id:"

Best = tuple[tuple[int, float], ...]


class Logprobs(msgspec.Struct, frozen=True):
    """Of each token of a choice: its own, and the highest ones, the token's among them, in no order."""

    token_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[str, float], ...] = ()


def asked(top_logits: int) -> dict[str, Any]:
    """What a request says to have them."""
    return {"logprobs": top_logits, "return_tokens_as_token_ids": True} if top_logits else {}


def scores(logprobs: Logprobs, tokens: int) -> tuple[Score, ...]:
    """Of the first so many tokens."""
    return tuple(Score(each, 0.0) for each in logprobs.token_logprobs[:tokens])


def top_logits(logprobs: Logprobs, tokens: int, count: int) -> tuple[Best, ...]:
    return tuple(_best(each)[:count] for each in logprobs.top_logprobs[:tokens])


def _best(by_token: dict[str, float]) -> Best:
    pairs = ((int(token.removeprefix(TOKEN)), logprob) for token, logprob in by_token.items())
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
