"""The load generator against a real front: what comes back is named for what it is, and nothing waits for anything."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from prfaas.tokenizer.text import load_tokenizer
from services.bench.client import Connections
from services.bench.drive import Driven, Driver
from services.bench.load import Api, Asking, Planned
from services.router.http.limits import Limits
from tests.integration.router_under_test import BREAKS, ECHO, FULL, STUCK, Router, running_router
from tests.unit.tokenizer.byte_level import write_model_dir


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    with running_router(uvloop.new_event_loop, tokenizer, Limits()) as running:
        yield running
    tokenizer.close()


async def driven(
    router: Router, model: str, at_s: list[float], *, timeout_s: float = 20.0, places: int = 100, api: Api = Api.TOKENS
) -> Driven:
    connections = Connections(router.url, "")
    asking = Asking(model=model, api=api, seed=1, low_token=3, high_token=99, ignore_eos=False)
    driver = Driver(connections=connections, asking=asking, timeout_s=timeout_s, max_in_flight=places)
    try:
        return await driver.drive([Planned(number, at, 12, 5) for number, at in enumerate(at_s)], lambda: None)
    finally:
        connections.close()


@pytest.mark.parametrize("api", Api)
async def test_whole_answers_have_their_tokens_and_times(router: Router, api: Api):
    """Each way of asking; the backend takes 20 ms to the first token."""
    run = await driven(router, ECHO, [0.0, 0.01, 0.02], api=api)
    for outcome in run.outcomes:
        assert outcome.failed is None, outcome.detail
        assert outcome.output_tokens == 5 and outcome.ttft_s is not None
        assert 0.02 <= outcome.ttft_s <= outcome.e2e_s and outcome.late_s >= 0
    if api is Api.TOKENS:
        assert [each.prompt_tokens for each in run.outcomes] == [12, 12, 12]


@pytest.mark.parametrize(
    ("model", "failed"), [(FULL, "503"), ("nobody", "404"), (BREAKS, "in_band"), (STUCK, "timeout")]
)
async def test_failures_are_counted_by_what_they_are(router: Router, model: str, failed: str):
    """An error in the middle of a stream is a failure too, although its status was 200."""
    run = await driven(router, model, [0.0, 0.0], timeout_s=0.3 if model == STUCK else 20.0)
    assert [each.failed for each in run.outcomes] == [failed, failed]


async def test_a_request_that_waits_for_a_place_is_late_by_that_wait(router: Router):
    """All are due at once and one at a time is sent: the last one's time to the first token holds all waits."""
    run = await driven(router, ECHO, [0.0] * 4, places=1)
    assert run.most_in_flight == 1
    last = run.outcomes[-1]
    assert last.late_s >= 3 * 0.02 and last.ttft_s is not None and last.ttft_s >= 4 * 0.02


async def test_a_stuck_request_holds_nobody_up(router: Router):
    """Open loop: those due later are sent at their times, while the first gets nothing."""
    run = await driven(router, STUCK, [0.0, 0.1, 0.2], timeout_s=1.0)
    assert run.most_in_flight == 3
    sends = [each.sent_s for each in run.outcomes]
    assert sends == sorted(sends) and all(each.late_s >= 0 for each in run.outcomes)


@contextlib.asynccontextmanager
async def forgetful_server() -> AsyncIterator[tuple[str, list[int]]]:
    """Answers one request per connection, says that it would keep it, and closes it."""
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
            served.append(1)
            event = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(event) + event)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", served


async def test_a_kept_connection_that_was_closed_is_replaced():
    """Another server's habits are not failures of requests, and none is sent twice."""
    async with forgetful_server() as (endpoint, served):
        connections = Connections(endpoint, "")
        events: list[bytes] = []
        for _ in range(3):
            async with asyncio.timeout(20):
                await connections.post("/v1/completions", b"{}", events.append)
        connections.close()
    assert len(events) == 6 and len(served) == 3


async def test_nobody_there_is_a_connection_that_failed():
    connections = Connections("http://127.0.0.1:1", "")
    asking = Asking(model="m", api=Api.TOKENS, seed=1, low_token=3, high_token=9, ignore_eos=False)
    driver = Driver(connections=connections, asking=asking, timeout_s=5.0, max_in_flight=1)
    run = await driver.drive([Planned(0, 0.0, 3, 1)], lambda: None)
    assert run.outcomes[0].failed == "connection"


def test_a_url_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no http"):
        Connections(str(tmp_path), "")
