"""The router's HTTP front over real sockets, on both event loops, with the official client and by hand."""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop

from prfaas.request import TTFT_TERMS, FinishReason
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer
from services.router.http.limits import Limits
from services.router.http.server import UNSENT_BYTES
from tests.integration.router_under_test import (
    BREAKS,
    BUGGY,
    ECHO,
    ENDLESS,
    FULL,
    LIVENESS_S,
    STALLS,
    STUCK,
    Router,
    running_router,
)
from tests.integration.wire import Answer, Wire, request
from tests.unit.tokenizer.byte_level import BOS_ID, write_model_dir

LIMITS = Limits(max_body_bytes=200_000, max_head_bytes=8192)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TEXT = "Grüße, 你好 🙂 the fox"
HELLO: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(params=LOOPS)
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]


@pytest.fixture
def router(new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer) -> Iterator[Router]:
    with running_router(new_loop, tokenizer, LIMITS) as router:
        yield router


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url, api_key="none", max_retries=0, timeout=LIVENESS_S) as client:
        yield client


def completion(model: str = ECHO, prompt: Any = TEXT, **fields: Any) -> bytes:
    return request("POST", "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 500} | fields)


# The official client.


def test_the_official_client_lists_models(client: openai.OpenAI):
    """And finds each by its name."""
    names = [card.id for card in client.models.list()]
    assert ECHO in names
    assert client.models.retrieve(ECHO).id == ECHO
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_the_official_client_chats(client: openai.OpenAI):
    """Streamed or whole, the text is the same, with characters that span tokens intact."""
    whole = client.chat.completions.create(model=ECHO, messages=HELLO)
    assert TEXT in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model=ECHO, messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 10
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_official_client_completes(client: openai.OpenAI):
    """Text or token ids; usage counts both; `length` when it was cut off."""
    whole = client.completions.create(model=ECHO, prompt=TEXT, max_tokens=500)
    assert whole.choices[0].text == TEXT
    stream = client.completions.create(model=ECHO, prompt=TEXT, max_tokens=500, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT
    cut = client.completions.create(
        model=ECHO, prompt=[70, 71, 72], max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].model_extra is not None and cut.choices[0].model_extra["token_ids"] == [70, 71]
    assert cut.usage is not None
    assert (cut.usage.prompt_tokens, cut.usage.completion_tokens, cut.usage.total_tokens) == (3, 2, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(client: openai.OpenAI, router: Router, stream: bool):
    """It does not show, and what runs behind it is ended."""
    answer: Any = client.completions.create(
        model=ENDLESS, prompt=TEXT, max_tokens=500, stop=["\N{SLIGHTLY SMILING FACE} the"], stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "Grüße, 你好 "
    assert choices[-1].finish_reason == "stop"
    router.backend.ended.get(timeout=LIVENESS_S)


def test_the_official_client_gets_its_own_errors(client: openai.OpenAI, router: Router):
    """With the parameter, the code and the time to wait."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as several:
        client.chat.completions.create(model=ECHO, messages=HELLO, n=100)
    assert several.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=ECHO, prompt=TEXT, max_tokens=2000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as full:
            client.completions.create(model=FULL, prompt=TEXT, stream=stream)
        assert (full.value.status_code, full.value.response.headers["retry-after"]) == (503, "3")
        with pytest.raises(openai.InternalServerError) as bug:
            client.completions.create(model=BUGGY, prompt=TEXT, stream=stream)
        assert bug.value.status_code == 500 and "secret" not in str(bug.value)


# Streams, by hand.


def test_field_M4_a_stream_is_laid_out_as_clients_expect(router: Router):
    """Role first, then text, the finish reason, the usage in a chunk of its own, and [DONE]."""
    with Wire(router.port) as wire:
        body = {"model": ECHO, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        answer = wire.ask("POST", "/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    first, *middle, last, usage, done = answer.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(chunk["usage"] is None for chunk in [first, *middle, last])
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
    assert done == "[DONE]"


def test_each_token_is_sent_at_once(router: Router):
    """A stream that has stalled has already shown all that there is."""
    with Wire(router.port) as wire:
        assert wire.send(completion(STALLS, [70, 71, 72], stream=True)).read_head()[0] == 200
        shown = b"".join([wire.read_chunk() for _ in range(2)])
    assert shown.count(b"data: ") == 3  # the opening and two tokens


def test_field_M3_a_failure_in_the_stream_is_told_in_the_stream(router: Router):
    """An error event, and no [DONE] that would make it look complete. The official client raises it."""
    with Wire(router.port) as wire:
        answer = wire.send(completion(BREAKS, [70, 71, 72], stream=True)).read()
        assert wire.ask("GET", "/live").status == 200
    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "service_unavailable"
    record = router.log()
    assert (record.status, record.error, record.output_tokens) == (200, "PeerUnavailable", 2)
    with openai.OpenAI(base_url=router.url, api_key="none", max_retries=0) as client, pytest.raises(openai.APIError):
        list(client.completions.create(model=BREAKS, prompt=[70, 71, 72], stream=True))


def test_usage_in_each_chunk_on_request(router: Router):
    """As load generators ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with Wire(router.port) as wire:
        events = wire.send(completion(prompt=[70, 71], stream=True, stream_options=options)).read().events
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 1, 2, 2, 2]


# The receipt.


@pytest.mark.parametrize("stream", [False, True])
def test_field_M1_the_receipt_accounts_for_the_clients_time_to_first_token(router: Router, stream: bool):
    """Only on request; the terms add up to what was measured at the client's edge, which no client sees undercut."""
    body = {"model": ECHO, "prompt": TEXT, "stream": stream}
    with Wire(router.port) as wire:
        plain = wire.ask("POST", "/v1/completions", body)
        started = time.monotonic()
        answer = wire.ask("POST", "/v1/completions", body, x_prfaas_receipt="1")
        took_s = time.monotonic() - started
    assert b"prfaas_receipt" not in plain.body
    carrier = answer.events[-2] if stream else answer.json
    if stream:
        assert carrier["choices"] == []
    receipt = carrier["prfaas_receipt"]
    account = receipt["ttft_account"]
    assert set(account) == {*TTFT_TERMS, "unaccounted"}
    assert sum(account.values()) == pytest.approx(receipt["ttft_seconds"])
    assert 0.02 <= account["prefill"] < receipt["ttft_seconds"] < took_s
    assert min(account["queue"], account["tokenize"]) > 0
    assert (receipt["path"], receipt["decode"], receipt["attempts"][0]["ending"]) == ("local", "d0", "done")


def test_every_request_is_recorded_once(router: Router):
    """With what metrics and the log line need."""
    with Wire(router.port) as wire:
        headers = {"x_request_id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        assert wire.ask("POST", "/v1/completions", {"model": ECHO, "prompt": [70, 71]}, **headers).status == 200
        wire.ask("GET", "/nowhere")
        wire.ask("POST", "/v1/completions", {"model": "nobody", "prompt": [70, 71]})
    done, nowhere, nobody = router.log(), router.log(), router.log()
    assert (done.route, done.status, done.model, done.stream, done.error) == ("completions", 200, ECHO, False, None)
    assert (done.prompt_tokens, done.output_tokens, done.finish) == (2, 2, FinishReason.STOP)
    assert (done.request_id, done.traceparent) == ("mine", headers["traceparent"])
    assert done.ttft_s is not None and 0 < done.ttft_s <= done.duration_s
    assert done.story is not None and done.story.route is not None
    assert (nowhere.route, nowhere.status) == ("unknown", 404)
    assert (nobody.status, nobody.error, nobody.model) == (404, "ModelNotFound", None)
    assert router.logs.empty()


# A client that leaves.


@pytest.mark.parametrize(
    ("model", "stream"), [(STUCK, False), (STUCK, True), (STALLS, False), (STALLS, True), (ENDLESS, True)]
)
def test_field_D1_a_client_that_leaves_ends_everything_within_a_second(router: Router, model: str, stream: bool):
    """Before the first token or in the middle, streamed or not; it is recorded as 499."""
    with Wire(router.port) as wire:
        wire.send(completion(model, stream=stream))
        if stream and model != STUCK:
            wire.read_head()
        else:
            _until(lambda: router.backend.running == 1)
        left = time.monotonic()
    assert router.backend.ended.get(timeout=LIVENESS_S) - left < 1.0
    assert router.log().status == 499
    _until(lambda: router.server.connections == 0)


def test_a_client_that_reads_nothing_holds_up_its_own_stream_only(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer
):
    """Tokens are taken from upstream no faster than they are read, and after a while the client is given up."""
    limits = Limits(write_timeout_s=1.0)
    with running_router(new_loop, tokenizer, limits) as router, Wire(router.port, receive_buffer=4096) as wire:
        wire.send(completion(ENDLESS, [70], stream=True))
        with Wire(router.port) as other:
            assert other.ask("GET", "/live").status == 200
        router.backend.ended.get(timeout=LIVENESS_S)
        assert router.backend.sent_batches < 5_000  # that is less than a MiB, on its way to the client
        records = [router.log(), router.log()]
        assert [record.status for record in records if record.stream] == [499]


def test_a_slow_reader_gets_everything(router: Router):
    """A client that pauses and comes back misses nothing."""
    with Wire(router.port, receive_buffer=4096) as wire:
        wire.send(completion(prompt=[70] * 1000, max_tokens=1000, stream=True))
        _until(lambda: router.backend.running == 0 or router.backend.sent_batches > 50)
        answer = wire.read()
    assert len(answer.events) == 1 + 1000 + 1 + 1


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# HTTP, by hand.


def test_pipelined_requests_are_answered_in_order(router: Router):
    """Also a stream between short ones, and when the bytes come one by one."""
    requests = [
        request("GET", "/v1/models/echo"),
        completion(prompt=[70, 71], stream=True),
        request("GET", "/nowhere"),
        completion(prompt=[72]),
        request("GET", "/live"),
    ]
    with Wire(router.port) as wire:
        wire.send(b"".join(requests))
        _in_order([wire.read() for _ in requests])
        for byte in b"".join(requests):
            wire.send(bytes([byte]))
        _in_order([wire.read() for _ in requests])


def _in_order(answers: list[Answer]) -> None:
    assert [answer.status for answer in answers] == [200, 200, 404, 200, 200]
    assert answers[0].json["id"] == ECHO
    assert answers[1].events[-1] == "[DONE]"
    assert answers[3].json["object"] == "text_completion"
    assert answers[4].json == {"status": "live"}


def test_bodies_may_come_in_chunks(router: Router):
    """Of any size."""
    body = json.dumps({"model": ECHO, "prompt": TEXT, "max_tokens": 500}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(
        [b"%x\r\n%b\r\n" % (len(part), part) for at in range(0, len(body), 7) if (part := body[at : at + 7])]
    )
    with Wire(router.port) as wire:
        assert wire.send(head + chunks + b"0\r\n\r\n").read().json["choices"][0]["text"] == TEXT


def test_a_client_that_waits_for_100_continue_gets_it(router: Router):
    """When the body is wanted, not in the middle of an earlier answer, and not when it came along."""
    whole = request(
        "POST", "/v1/completions", {"model": ECHO, "prompt": TEXT, "max_tokens": 500}, expect="100-continue"
    )
    head, _, body = whole.partition(b"\r\n\r\n")
    with Wire(router.port) as wire:
        assert wire.send(head + b"\r\n\r\n").read().status == 100
        assert wire.send(body).read().json["choices"][0]["text"] == TEXT
        wire.send(completion(prompt=[70]) + head + b"\r\n\r\n")
        assert [wire.read().status, wire.read().status] == [200, 100]
        assert wire.send(body).read().status == 200
        assert wire.send(whole).read().status == 200
        assert wire.ask("GET", "/live").status == 200


def test_a_body_that_is_too_large_is_refused_while_it_is_being_sent(router: Router):
    """The client gets to read the answer although it is still sending."""
    declared = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for head, part in ((declared, b"x" * 65536), (chunked, b"10000\r\n" + b"x" * 65536 + b"\r\n")):
        with Wire(router.port) as wire:
            wire.send(head)
            for _ in range(20):
                wire.send(part)
            answer = wire.read()
            assert (answer.status, answer.json["error"]["type"]) == (413, "invalid_request_error")
            assert answer.headers["connection"] == "close"
            assert wire.rest() == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_garbage_is_told_so(router: Router, garbage: bytes):
    """After the answers to what came before it; then the connection ends."""
    with Wire(router.port) as wire:
        wire.send(request("GET", "/live") + garbage)
        assert wire.read().status == 200
        answer = wire.read()
        assert (answer.status, set(answer.json["error"])) == (400, {"message", "type", "param", "code"})
        assert wire.rest() == b""


def test_routes_and_methods(router: Router):
    """404 and 405 are JSON errors; HEAD is GET without the body; readiness follows the cluster, liveness does not."""
    with Wire(router.port) as wire:
        assert wire.ask("GET", "/v1/nothing").json["error"]["type"] == "invalid_request_error"
        refused = wire.ask("DELETE", "/v1/chat/completions")
        assert (refused.status, refused.headers["allow"]) == (405, "POST")
        head = wire.ask("HEAD", "/v1/models")
        assert (head.status, int(head.headers["content-length"]) > 0) == (200, True)
        assert wire.ask("HEAD", "/v1/nothing").status == 404
        assert wire.ask("GET", "/metrics").body.startswith(b"# TYPE")
        assert [wire.ask("GET", path).status for path in ("/live", "/ready", "/health")] == [200, 200, 200]
        router.backend.why_not = "all nodes that decode are draining"
        assert [wire.ask("GET", path).status for path in ("/live", "/ready", "/health")] == [200, 503, 503]
        router.backend.names = ()
        gone = wire.ask("POST", "/v1/completions", {"model": ECHO, "prompt": "x"})
        assert (gone.status, gone.headers["retry-after"]) == (503, "1")
        for told in (gone, wire.ask("GET", "/ready")):
            assert "all nodes that decode are draining" in told.json["error"]["message"]


def test_a_model_that_left_may_be_asked_for_again(router: Router):
    """503, which clients ask again after; a name that nobody knows is the client's mistake."""
    router.backend.left.add("left")
    with Wire(router.port) as wire:
        left, wrong = (wire.ask("POST", "/v1/completions", {"model": name, "prompt": "x"}) for name in ("left", "no"))
    assert (left.status, left.headers["retry-after"], wrong.status) == (503, "1", 404)


def test_every_answer_is_dated(router: Router):
    """As RFC 9110 wants it of whoever has a clock, refusals included."""
    with Wire(router.port) as wire:
        answers = [wire.ask("GET", "/live"), wire.ask("GET", "/nowhere"), wire.send(b"garbage\r\n\r\n").read()]
    for answer in answers:
        assert abs(parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()) < LIVENESS_S


def test_request_ids_are_echoed_or_made(router: Router):
    """On every answer; one that is unfit for a header is replaced."""
    with Wire(router.port) as wire:
        assert wire.ask("GET", "/nowhere", x_request_id="abc-1").headers["x-request-id"] == "abc-1"
        made = [wire.ask("GET", "/live", **given).headers["x-request-id"] for given in ({}, {"x_request_id": "a b"})]
        assert all(len(one) == 32 for one in made) and made[0] != made[1]


def test_http_10_clients_are_served(router: Router):
    """Their streams end with the connection; it stays open only when they ask for it."""
    body = json.dumps({"model": ECHO, "prompt": [70, 71], "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    with Wire(router.port) as wire:
        answer = wire.send(head + body).read()
        assert "transfer-encoding" not in answer.headers
        assert answer.events[-1] == "[DONE]"
    with Wire(router.port) as wire:
        assert wire.send(b"GET /live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").read().status == 200
        assert wire.send(b"GET /live HTTP/1.0\r\n\r\n").read().status == 200
        assert wire.rest() == b""


# Limits in time and number.


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (b"GET /li", [408]),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", [408]),
        (request("GET", "/live"), [200]),
        (request("GET", "/live") + b"GET /li", [200, 408]),
    ],
)
def test_clients_that_do_not_go_on_are_let_go(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer, sent: bytes, statuses: list[int]
):
    """Between requests in silence, within one with 408."""
    limits = Limits(idle_timeout_s=0.2, head_timeout_s=0.2, body_timeout_s=0.2, linger_s=0.2)
    with running_router(new_loop, tokenizer, limits) as router, Wire(router.port) as wire:
        wire.send(sent)
        assert [wire.read().status for _ in statuses] == statuses
        assert wire.rest() == b""
        _until(lambda: router.server.connections == 0)  # although the client has not closed


def test_dripping_bytes_do_not_extend_the_time(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer
):
    """The limit is for the whole head."""
    limits = Limits(head_timeout_s=0.3, idle_timeout_s=LIVENESS_S)
    with running_router(new_loop, tokenizer, limits) as router, Wire(router.port) as wire:
        wire.send(b"GET / HTTP/1.1\r\nX: ").socket.settimeout(0.02)
        answered = b""
        deadline = time.monotonic() + LIVENESS_S
        while not answered and time.monotonic() < deadline:
            wire.send(b"x")
            with contextlib.suppress(TimeoutError):
                answered = wire.socket.recv(4096)
        assert answered.startswith(b"HTTP/1.1 408 ")


def test_connections_beyond_the_limit_are_turned_away(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer
):
    """With 503; there is room again when one has left."""
    with running_router(new_loop, tokenizer, Limits(max_connections=1)) as router:
        with Wire(router.port) as first:
            assert first.ask("GET", "/live").status == 200
            with Wire(router.port) as second:
                assert second.read().status == 503
                assert second.rest() == b""
        _until(lambda: router.server.connections == 0)
        with Wire(router.port) as third:
            assert third.ask("GET", "/live").status == 200


# The end.


def test_draining_lets_requests_finish(router: Router):
    """Idle connections end at once, a request under way is answered whole, and nobody is let in."""
    with Wire(router.port) as idle, Wire(router.port) as busy:
        assert idle.ask("GET", "/live").status == 200
        busy.send(completion(prompt=[70] * 1000, max_tokens=1000, stream=True)).read_head()
        router.call(_drain_while(router, busy, idle))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", router.port), timeout=LIVENESS_S)


async def _drain_while(router: Router, busy: Wire, idle: Wire) -> None:
    drain = asyncio.create_task(router.server.drain(LIVENESS_S))
    assert await asyncio.to_thread(idle.rest) == b""
    chunks = await asyncio.to_thread(lambda: list(iter(busy.read_chunk, b"")))
    assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(busy.rest) == b""
    busy.close()
    idle.close()
    await drain
    assert router.server.connections == 0


def test_who_connects_at_the_last_moment_is_answered(router: Router):
    """A connection that waits to be accepted when the drain begins is one of ours."""
    with Wire(router.port) as wire:
        router.call(_connect_and_drain(router, wire))
        assert wire.read().status == 200
        assert wire.rest() == b""


async def _connect_and_drain(router: Router, first: Wire) -> None:
    """Within one turn of the loop, so that nothing is accepted in between."""
    first.close()
    first.__init__(router.port)  # type: ignore[misc]
    first.send(request("GET", "/live"))
    drain = asyncio.create_task(router.server.drain(LIVENESS_S))
    while not router.server._draining:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert router.server.connections == 1
    first.socket.shutdown(socket.SHUT_WR)
    await drain


def test_what_the_kernel_keeps_for_a_client_is_bounded(router: Router):
    """In bytes that are not on their way, and in time: connections inherit both from the listening socket."""
    with Wire(router.port) as wire:
        assert wire.ask("GET", "/live").status == 200
        (connection,) = router.server._connections
        socket_options = connection._transport.get_extra_info("socket").getsockopt
        assert socket_options(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert socket_options(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
        assert socket_options(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LIMITS.write_timeout_s * 1000


def test_draining_is_bounded(router: Router):
    """What does not finish in time is cut off and cancelled."""
    with Wire(router.port) as wire:
        wire.send(completion(STALLS, [70, 71, 72], stream=True)).read_head()
        router.call(router.server.drain(0.1))
        assert (router.server.connections, router.backend.running) == (0, 0)
    assert router.log().status == 499


def test_what_is_cut_off_is_told_why(router: Router):
    """When a drain has lasted too long, a stream that can still be told ends in words."""

    async def end() -> None:
        router.backend.stopping.set()

    with Wire(router.port) as wire:
        wire.send(completion(STALLS, [70, 71, 72], stream=True)).read_head()
        router.call(router.server.drain(0.1, end))
        assert b"the router is stopping" in wire.rest()
        assert (router.server.connections, router.backend.running) == (0, 0)
    assert router.log().status != 499


def test_tls(new_loop: Callable[[], asyncio.AbstractEventLoop], tokenizer: TextTokenizer, tmp_path: Path):
    """The same over TLS: answers, refusals, leaving, and handshakes that fail."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    client_side = ssl.create_default_context(cafile=str(certificate))
    with running_router(new_loop, tokenizer, Limits(linger_s=0.5), server_side) as router:
        with Wire(router.port) as plain:
            plain.send(b"GET / HTTP/1.1\r\n\r\n").rest()
        with Wire(router.port, tls=client_side) as wire:
            assert wire.send(completion(stream=True)).read().events[-1] == "[DONE]"
            assert wire.send(b"garbage\r\n\r\n").read().status == 400
            assert wire.rest() == b""
        with Wire(router.port, tls=client_side) as wire:
            wire.send(completion(STALLS, stream=True)).read_head()
        _until(lambda: router.server.connections == 0)


def test_special_tokens_do_not_show(client: openai.OpenAI):
    """What the prompt was given, and the model repeats, is no text."""
    assert client.completions.create(model=ECHO, prompt=[BOS_ID, 70, BOS_ID], max_tokens=9).choices[0].text != ""
    assert client.completions.create(model=ECHO, prompt=[BOS_ID, BOS_ID], max_tokens=9).choices[0].text == ""
