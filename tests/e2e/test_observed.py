"""What a whole cluster tells of its requests: where their time went, spans, and lines in the request log."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prfaas.request import TTFT_TERMS
from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import Completed, complete, eventually, metrics, openai_client, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import token_ids
from tests.otlp_collector import Collector, Seen, collector

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
#: As the conventions have it, on the loopback interface.
UNACCOUNTED_S = 0.001
#: On top of that, what a clock that is read twice may be off.
CLOCK_S = 1e-6


@dataclass(frozen=True)
class Observed:
    cluster: LocalCluster
    collector: Collector
    log: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def observed(
    start_embedded: StartCluster, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Observed]:
    """Prompts of more than 500 tokens cross from region a to b. All processes know the collector."""
    log = tmp_path_factory.mktemp("requests") / "log.jsonl"
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=500, extra={"router": ("--request-log", str(log))})
    with collector() as spans, pytest.MonkeyPatch.context() as patch:
        for name, value in spans.environment().items():
            patch.setenv(name, value)
        async with start_embedded(plan) as cluster:
            yield Observed(cluster, spans, log)


async def test_field_M1_the_account_closes_on_the_remote_path_under_load(observed: Observed):
    """Twenty-four prompts at once queue for one prefill node and cross, every other one for a stream: of none more than
    a millisecond is not accounted for, whatever waited where. The histograms of the router say the same."""
    done = await asyncio.gather(
        *(
            (streamed if number % 2 else complete)(observed.cluster, token_ids(600 + 90 * number, seed=number), 4)
            for number in range(24)
        )
    )
    for one in done:
        account = one.receipt["ttft_account"]
        assert one.receipt["path"] == "remote"
        assert set(account) == {*TTFT_TERMS, "unaccounted"}
        assert math.isclose(sum(account.values()), one.receipt["ttft_seconds"], abs_tol=CLOCK_S)
        assert abs(account["unaccounted"]) <= UNACCOUNTED_S, account
        assert min(account[term] for term in TTFT_TERMS) > 0
    assert max(one.receipt["ttft_account"]["prefill_queue"] for one in done) > 0.1  # there was a queue
    samples = await metrics(observed.cluster, "router")
    remote = {"path": "remote"}
    for term in TTFT_TERMS:
        name = "prfaas_router_ttft_term_seconds"
        told = sum(one.receipt["ttft_account"][term] for one in done)
        assert total(samples, f"{name}_count", term=term, **remote) == len(done)
        assert total(samples, f"{name}_sum", term=term, **remote) == pytest.approx(told)
        assert total(samples, f"{name}_count", term=term, path="local") == 0
    within = total(samples, "prfaas_router_ttft_unaccounted_seconds_bucket", le="0.001", **remote)
    assert within == total(samples, "prfaas_router_ttft_unaccounted_seconds_count", **remote) == len(done)


async def test_one_trace_goes_through_the_cluster(observed: Observed):
    """The caller's trace goes on in the router, in the prefill of the other region, in the transfer from there, and in
    the decode: four processes, one trace, each span where it belongs and within its parent's time."""
    await traced(observed, f"00-{TRACE}-{PARENT}-01")
    spans = observed.collector.wait_for(lambda spans: len(of_trace(spans, TRACE)) >= 4)
    seen = {span.resource["service.instance.id"] + " " + span.name: span for span in of_trace(spans, TRACE)}
    [router] = [span for span in seen.values() if span.parent_id == PARENT]
    prefill, transfer = seen["prefill-0 prefill"], seen["prefill-0 transfer"]
    [decode] = [span for span in seen.values() if span.name == "decode"]
    assert len(seen) == 4
    assert prefill.parent_id == decode.parent_id == router.span_id
    assert transfer.parent_id == prefill.span_id
    for span in (router, prefill, transfer, decode):
        assert span.status == 0 and span.end_ns > span.start_ns
    # The clocks are one machine's.
    for inner, outer in ((prefill, router), (transfer, prefill)):
        assert outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
    model = observed.cluster.plan.model_dir.name
    assert router.name == f"text_completion {model}"
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "prfaas",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": 700,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
        "prfaas.path": "remote",
        "prfaas.prefill": "prefill-0",
        "prfaas.decode": decode.facts["prfaas.node"],
    }.items() <= router.facts.items()
    assert decode.facts["gen_ai.usage.output_tokens"] == 4
    assert transfer.facts["prfaas.kv_bytes"] == prefill.facts["prfaas.kv_bytes"] > 0
    assert [span.resource["service.name"] for span in (router, prefill, decode)] == [
        "prfaas-router",
        "prfaas-prefill-worker",
        "prfaas-decode-worker",
    ]


async def test_a_traceparent_that_is_none_is_not_carried_on(observed: Observed):
    """A trace of its own begins; the request is served."""
    before = {span.trace_id for span in observed.collector.spans}
    await traced(observed, f"00-{'0' * 32}-{PARENT}-01")
    spans = observed.collector.wait_for(lambda spans: sum(span.trace_id not in before for span in spans) >= 4)
    own = [span for span in spans if span.trace_id not in before]
    assert len({span.trace_id for span in own}) == 1 and own[0].trace_id != "0" * 32
    [root] = [span for span in own if not span.parent_id]
    assert root.resource["service.name"] == "prfaas-router"


async def test_a_trace_that_is_not_sampled_costs_no_spans(observed: Observed):
    """The caller decides, also for the workers."""
    unsampled = TRACE[::-1]
    await traced(observed, f"00-{unsampled}-{PARENT}-00")
    mark = "1" * 32
    await traced(observed, f"00-{mark}-{PARENT}-01")
    spans = observed.collector.wait_for(lambda spans: len(of_trace(spans, mark)) >= 4)
    assert not of_trace(spans, unsampled)


async def test_requests_are_in_the_log_as_their_receipts_tell(observed: Observed):
    """One line each, with the account and the trace, and names for what the prompt begins with."""
    done = await traced(observed, f"00-{'2' * 32}-{PARENT}-01", request_id="logged")

    async def logged() -> list[dict[str, Any]]:
        """the line is written"""
        lines = [json.loads(line) for line in observed.log.read_text().splitlines()]
        return [line for line in lines if line["request_id"] == "logged"]

    await eventually(logged)
    [line] = await logged()
    assert (line["trace_id"], line["prompt_tokens"], line["output_tokens"]) == ("2" * 32, 700, 4)
    assert (line["path"], line["prefill"], line["outcome"]) == ("remote", "prefill-0", "ok")
    assert line["account"] == pytest.approx(done.receipt["ttft_account"])
    assert line["prefix"]


async def streamed(cluster: LocalCluster, ids: list[int], max_tokens: int) -> Completed:
    """The receipt comes with the last chunk."""
    async with openai_client(cluster) as client:
        chunks = await client.completions.create(
            model=cluster.plan.model_dir.name,
            prompt=ids,
            max_tokens=max_tokens,
            stream=True,
            extra_headers={"x-prfaas-receipt": "1"},
        )
        extras = [chunk.model_extra async for chunk in chunks]
    [receipt] = [extra["prfaas_receipt"] for extra in extras if extra and "prfaas_receipt" in extra]
    return Completed([], receipt)


async def traced(observed: Observed, traceparent: str, request_id: str = "one") -> Completed:
    cluster = observed.cluster
    async with openai_client(cluster) as client:
        answer = await client.completions.create(
            model=cluster.plan.model_dir.name,
            prompt=token_ids(700, seed=len(observed.collector.spans)),
            max_tokens=4,
            extra_headers={"traceparent": traceparent, "x-request-id": request_id, "x-prfaas-receipt": "1"},
        )
    assert answer.model_extra is not None
    return Completed([], answer.model_extra["prfaas_receipt"])


def of_trace(spans: list[Seen], trace_id: str) -> list[Seen]:
    return [span for span in spans if span.trace_id == trace_id]
