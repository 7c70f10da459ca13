"""The span of one completion, in the words of OpenTelemetry's conventions for generative AI; ours begin with `prfaas.`.

It begins when the request came and ends with its last byte. Prompts and answers are no part of it.
"""

from collections.abc import Iterator
from itertools import chain

from prfaas.observe.tracing import Fact, Tracing
from services.router.http.messages import HttpRequest
from services.router.openai.record import RequestLog

#: By the name of the route.
OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat"}


def begin(tracing: Tracing, http: HttpRequest, record: RequestLog, now_s: float) -> None:
    """From here on the record's `traceparent` is the span's own, for whoever works for the request."""
    operation = OPERATIONS[record.route]
    facts: dict[str, Fact] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "prfaas",
        "http.request.method": http.method,
        "url.path": http.path,
    }
    parent = record.traceparent or ""
    record.span = tracing.begin(operation, parent, facts, server=True, ago_s=now_s - http.received_s)
    if record.span is not None:
        record.traceparent = record.span.traceparent


def end(record: RequestLog) -> None:
    span = record.span
    if span is None:
        return
    if span.recorded:
        if record.model is not None:
            span.rename(f"{OPERATIONS[record.route]} {record.model}")
        span.note(dict(chain(_answered(record), _asked(record), _went(record))))
        if record.error is not None and (record.status >= 500 or record.status == 200):
            span.fail(record.error)
    span.end()


def _answered(record: RequestLog) -> Iterator[tuple[str, Fact]]:
    yield "http.response.status_code", record.status
    if record.error is not None:
        yield "error.type", record.error
    if record.completion_id is not None:
        yield "gen_ai.response.id", record.completion_id
    finishes = [story.finish.value for story in record.stories if story.finish is not None]
    if finishes:
        yield "gen_ai.response.finish_reasons", finishes
    yield "gen_ai.usage.output_tokens", record.output_tokens
    if record.prompt_tokens is not None:
        yield "gen_ai.usage.input_tokens", record.prompt_tokens
    if record.stream and record.ttft_s is not None:
        yield "gen_ai.response.time_to_first_chunk", record.ttft_s


def _asked(record: RequestLog) -> Iterator[tuple[str, Fact]]:
    yield "prfaas.tenant", record.tenant
    yield "prfaas.request_id", record.request_id
    yield "gen_ai.request.stream", record.stream
    if record.model is not None:
        yield "gen_ai.request.model", record.model
        yield "gen_ai.response.model", record.model
    if record.requests:
        sampling = record.requests[0].sampling
        yield "gen_ai.request.max_tokens", sampling.max_tokens
        yield "gen_ai.request.temperature", sampling.temperature
        yield "gen_ai.request.top_p", sampling.top_p
        if len(record.requests) > 1:
            yield "gen_ai.request.choice.count", len(record.requests)


def _went(record: RequestLog) -> Iterator[tuple[str, Fact]]:
    """The way of the first sequence, and where the time to the first token went."""
    story = record.story
    if story is not None and story.route is not None:
        yield "prfaas.path", story.route.path.value
        yield "prfaas.reason", story.route.reason.value
        yield "prfaas.prefill", story.route.prefill
        yield "prfaas.decode", story.route.decode
        yield "prfaas.attempts", len(story.attempts)
    if story is not None and story.prefill is not None:
        yield "gen_ai.usage.cache_read.input_tokens", story.prefill.cached_tokens
    if record.account is not None:
        for term, seconds in record.account.seconds.items():
            yield f"prfaas.ttft.{term}_seconds", seconds
        yield "prfaas.ttft.unaccounted_seconds", record.account.unaccounted_s
