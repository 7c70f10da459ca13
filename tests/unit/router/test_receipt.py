"""The decision receipt."""

from dataclasses import replace

import pytest

from prfaas.cluster import NodeId
from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Attempt, Ending, Migration, Moved, Story
from prfaas.request import (
    TTFT_TERMS,
    Alternative,
    AttemptId,
    Match,
    Path,
    Predicted,
    Pull,
    Reason,
    Request,
    RequestId,
    Route,
    Sampling,
    TtftAccount,
)
from prfaas.tokenizer.text import pack
from services.router.openai.account import Account
from services.router.openai.receipt import account, described_route, receipt
from services.router.openai.record import RequestLog

NOTHING = TtftAccount()
P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")
REQUEST = Request(id=RequestId("r"), model="m", prompt=pack(range(1, 1001)), sampling=Sampling(max_tokens=5))


def route(prefill: NodeId, reason: Reason, uncached_tokens: int) -> Route:
    alternative = Alternative(Path.LOCAL, D0, D0, 999, 0)
    return Route(
        prefill=prefill,
        decode=D0,
        path=Path.REMOTE,
        reason=reason,
        uncached_tokens=uncached_tokens,
        transfer_tokens=999,
        threshold_tokens=512,
        alternatives=(alternative,),
    )


def story() -> Story:
    return Story(
        attempts=[
            Attempt(AttemptId("a"), route(P0, Reason.LONG_PROMPT, 999), Ending.PREFILL_LOST, "reset"),
            Attempt(AttemptId("b"), route(P1, Reason.FALLBACK, 899), Ending.DONE),
        ],
        terms={"route": 0.001, "prefill": 0.5, "network": 0.02},
        prefill=PrefillReport(queue_s=0.0, compute_s=0.5, exposed_s=0.0, prefill_tokens=899, kv_bytes=12345),
        recomputed_tokens=1,
    )


def test_the_account_has_every_term_and_adds_up():
    """What the edge measured, what the flow measured, 0 for what did not occur, and what is left."""
    record = RequestLog(queue_s=0.01, tokenize_s=0.03, ttft_s=0.6)
    body = receipt(REQUEST, story(), 5, account(story(), record, written_s=0.0))
    terms = body["ttft_account"]
    assert list(terms) == [*TTFT_TERMS, "unaccounted"]
    assert (terms["queue"], terms["tokenize"], terms["prefill"], terms["decode_queue"]) == (0.01, 0.03, 0.5, 0.0)
    assert sum(terms.values()) == pytest.approx(body["ttft_seconds"]) == 0.6


def test_both_edges_of_the_router_are_accounted_for():
    """Laps of the record follow each other without a gap; what a failed attempt took is a wait as that for the turn
    was; and from the first tokens on, what makes text of them and writes it is of the same term as what made tokens."""
    record, told = RequestLog(lap_s=100.0), story()
    record.waited(100.25)
    record.tokenized(100.5)
    record.waited(101.5)
    told.terms["queue"], told.first_s, record.ttft_s = 4.0, 110.0, 10.125
    seconds = account(told, record, written_s=110.125).seconds
    assert (seconds["queue"], seconds["tokenize"]) == (0.25 + 1.0 + 4.0, 0.25 + 0.125)


def test_the_account_is_that_of_the_sequence_which_was_first():
    """Of several sequences it is their first token's time that was measured, so it is theirs that is told of."""
    now = [10.0]
    stories = [Story(terms={"prefill": 5.0}, first_s=17.0), Story(terms={"prefill": 1.0}, first_s=12.0)]
    record = RequestLog()
    one = Account(
        requests=[REQUEST, REQUEST],
        stories=stories,
        choices=2,
        record=record,
        received_s=10.0,
        now=lambda: now[0],
        created=0,
    )
    now[0] = 12.5
    one.first_token_out(1)
    now[0] = 20.0
    one.first_token_out(0)
    assert record.account is not None
    assert (record.ttft_s, record.account.seconds["prefill"], record.account.seconds["tokenize"]) == (2.5, 1.0, 0.5)


def test_the_receipt_tells_the_route_and_every_attempt():
    """Of the latest route why it was taken and what else was weighed; of all attempts how they ended."""
    body = receipt(REQUEST, story(), 5, NOTHING)
    assert (body["path"], body["reason"], body["prefill"], body["decode"]) == ("remote", "fallback", "p1", "d0")
    assert (body["threshold_tokens"], body["prompt_tokens"], body["uncached_tokens"]) == (512, 1000, 899)
    assert (body["cached_tokens"], body["transfer_tokens"], body["kv_bytes"]) == (100, 999, 12345)
    assert (body["recomputed_tokens"], body["output_tokens"]) == (1, 5)
    assert [(one["route"]["prefill"], one["ending"]) for one in body["attempts"]] == [
        ("p0", "prefill_lost"), ("p1", "done"),
    ]  # fmt: skip
    assert body["alternatives"] == [
        {
            "path": "local",
            "prefill": "d0",
            "decode": "d0",
            "uncached_tokens": 999,
            "transfer_tokens": 0,
            "transfer_bytes": None,
            "predicted_ttft_seconds": None,
            "predicted": None,
        }
    ]


def test_a_stream_that_went_on_elsewhere_has_the_receipt_of_its_first_token():
    """The route is the one that led to it; the attempts say what came after, and how much each was given."""
    moved = story()
    moved.opening = moved.attempts[-1]
    moved.attempts[-1].ending = Ending.DECODE_LOST
    moved.attempts.append(Attempt(AttemptId("c"), route(P0, Reason.LONG_PROMPT, 3), Ending.DONE, replayed_tokens=4))
    moved.migrations.append(Migration(4, 10.0, Moved.MOVED, gap_s=0.5))
    body = receipt(REQUEST, moved, 5, NOTHING)
    assert (body["prefill"], body["uncached_tokens"], body["kv_bytes"]) == ("p1", 899, 12345)
    assert (body["migrations"], [one["replayed_tokens"] for one in body["attempts"]]) == (1, [0, 0, 4])
    assert receipt(REQUEST, story(), 5, NOTHING)["migrations"] == 0


def test_a_route_tells_what_it_was_expected_to_cost():
    """By the terms of the account, so that both can be compared."""
    predicted = Predicted(prefill_queue_s=0.5, prefill_s=1.0, transfer_exposed_s=0.25)
    way = Alternative(Path.LOCAL, D0, D0, 999, 0, predicted=predicted)
    chosen = replace(route(P0, Reason.LONG_PROMPT, 999), predicted=predicted, transfer_bytes=777, prefill_tokens=999)
    told = described_route(replace(chosen, alternatives=(way,)), 1000)
    for each in (told, *told["alternatives"]):
        assert each["predicted_ttft_seconds"] == 1.75
        assert {term: s for term, s in each["predicted"].items() if s} == {
            "prefill_queue": 0.5, "prefill": 1.0, "transfer_exposed": 0.25,
        }  # fmt: skip
        assert set(each["predicted"]) <= set(TTFT_TERMS)
    assert (told["transfer_bytes"], told["prefill_tokens"], told["pull"]) == (777, 999, None)


def test_a_route_tells_what_fetching_a_prefix_would_cost():
    """And whether it counts on that; what is not known is not made up."""
    known = Pull(source=P1, tokens=512, nbytes=4096, transfer_s=0.1, recompute_s=0.4, chosen=True)
    for pull, figures in ((known, (4096, 0.1, 0.4, True)), (Pull(source=P1, tokens=512), (None, None, None, False))):
        told = described_route(replace(route(P0, Reason.LONG_PROMPT, 999), pull=pull), 1000)["pull"]
        assert (told["source"], told["tokens"]) == ("p1", 512)
        assert (told["bytes"], told["transfer_seconds"], told["recompute_seconds"], told["chosen"]) == figures


def test_the_receipt_sets_what_was_reported_beside_what_was_matched():
    """So that whoever reads it sees how far off the index was."""
    told = story()
    assert told.prefill is not None
    told.match, told.prefill = Match(512, 640, 320), replace(told.prefill, cached_tokens=448, pulled_bytes=64)
    assert receipt(REQUEST, told, 5, NOTHING)["cache"] == {
        "matched_kv_tokens": 640,
        "matched_joint_tokens": 512,
        "matched_own_tokens": 320,
        "reported_tokens": 448,
        "pulled_bytes": 64,
    }
    nothing = Story()
    assert set(receipt(REQUEST, nothing, 0, NOTHING)["cache"].values()) == {0}


def test_the_last_prompt_token_is_not_a_cache_hit():
    """Decode computes it in any case, whichever way a route counts it."""
    for uncached_tokens in (999, 1000):
        one = Story(attempts=[Attempt(AttemptId("a"), route(P0, Reason.LONG_PROMPT, uncached_tokens))])
        assert receipt(REQUEST, one, 1, NOTHING)["cached_tokens"] == 0
