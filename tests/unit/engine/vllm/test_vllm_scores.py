"""What a server says of its tokens, in the words of the engine port."""

import math

from prfaas.engine.vllm.scores import Logprobs, asked, scores, top_logits

#: As vLLM writes it: the token drawn comes first, whatever its place.
SAID = Logprobs(
    token_logprobs=(-1.5, -0.1),
    top_logprobs=(
        {"token_id:7": -1.5, "token_id:9": -0.5, "token_id:3": -1.5},
        {"token_id:4": -0.1, "token_id:8": -3.0},
    ),
)


def test_the_highest_come_first_and_no_more_than_were_asked_for():
    assert top_logits(SAID, 2, 2) == (((9, -0.5), (3, -1.5)), ((4, -0.1), (8, -3.0)))
    assert top_logits(SAID, 1, 5) == (((9, -0.5), (3, -1.5), (7, -1.5)),)


def test_a_score_gives_the_probability_of_its_token():
    [first, second] = scores(SAID, 2)
    assert math.isclose(first.logit - first.log_normaliser, -1.5)
    assert math.isclose(second.logit - second.log_normaliser, -0.1)
    assert len(scores(SAID, 1)) == 1


def test_a_request_asks_for_ids_and_only_when_they_are_wanted():
    """Different tokens may have the same text."""
    assert asked(5) == {"logprobs": 5, "return_tokens_as_token_ids": True}
    assert asked(0) == {}
