"""What a drill takes away and gives back: the line between the regions, and the embedded store. Both come back by
themselves, should whoever took them away be gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from prfaas.config import StoreConfig
from prfaas.live.wan_relay import RelayRoute, WanRelay
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.stores import open_store
from services.http_client import ask
from services.store_switch import store_switch

LIVENESS_S, QUIET_S = 20.0, 0.5


@asynccontextmanager
async def line() -> AsyncIterator[tuple[WanRelay, int]]:
    """A relay, and its port, in front of an echo."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    async with (
        server,
        await WanRelay.start([RelayRoute("127.0.0.1", 0, "127.0.0.1", target)], bits_per_s=1e9, rtt_s=0.002) as relay,
    ):
        yield relay, relay.ports[0]


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> bool:
    writer.write(b"x")
    try:
        async with asyncio.timeout(seconds):
            await reader.readexactly(1)
    except TimeoutError:
        return False
    return True


async def test_a_cut_line_stays_connected_and_carries_nothing():
    """Connections that are there, and such that are made meanwhile. What was sent arrives when it is mended."""
    async with line() as (relay, port):
        before = await asyncio.open_connection("127.0.0.1", port)
        assert await answers(*before, LIVENESS_S)
        relay.cut(LIVENESS_S)
        during = await asyncio.open_connection("127.0.0.1", port)
        for reader, writer in (before, during):
            assert not await answers(reader, writer, QUIET_S)
        relay.mend()
        for reader, writer in (before, during):
            async with asyncio.timeout(LIVENESS_S):
                assert await reader.readexactly(1) == b"x"
            writer.close()


async def test_a_cut_ends_by_itself():
    """Also when nobody mends it, and a second cut counts from its own beginning."""
    async with line() as (relay, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert relay.command_cut("seconds=0.3")[0] == 200
        assert relay.command_cut("seconds=0.6")[0] == 200
        assert await answers(reader, writer, LIVENESS_S)
        for wrong in ("", "seconds=-1", "seconds=nan", "seconds=x", "seconds=1e9"):
            assert relay.command_cut(wrong)[0] == 400
        writer.close()


@asynccontextmanager
async def switched() -> AsyncIterator[tuple[Callable[..., Awaitable[int]], Callable[[], Awaitable[bool]]]]:
    """Asks the switch of an embedded store, and whether the store answers."""
    kept = MemoryStore()
    server = EmbeddedStoreServer(kept, "127.0.0.1", 0)
    await server.start()
    client = open_store(StoreConfig(endpoints=(server.endpoint,)))
    await kept.put("/a", b"1")

    async def is_there() -> bool:
        """Nobody listens while it is off."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        async with store_switch(server, "secret") as url:

            async def post(path: str, **query: object) -> int:
                pairs = "&".join(f"{name}={value}" for name, value in query.items())
                return (await asyncio.to_thread(ask, "POST", f"{url}{path}?{pairs}"))[0]

            yield post, is_there
        assert await is_there(), "the store is left off"
        async with asyncio.timeout(LIVENESS_S):
            assert [entry.value for entry in (await client.list("/a")).entries] == [b"1"]
    finally:
        await client.close()
        await server.stop()


async def until(condition: Callable[[], Awaitable[bool]], wanted: bool) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while await condition() is not wanted:  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(0.05)


async def test_a_store_that_is_off_comes_back_with_what_it_had():
    """When it is told to, or after its time."""
    async with switched() as (post, is_there):
        assert await post("/store/stop", token="secret", seconds=LIVENESS_S) == 200
        await until(is_there, False)
        assert await post("/store/stop", token="secret", seconds=1) == 409
        assert await post("/store/start", token="secret") == 200
        await until(is_there, True)
        assert await post("/store/stop", token="secret", seconds=0.5) == 200
        await until(is_there, False)
        await until(is_there, True)


async def test_a_switch_obeys_only_who_has_the_token():
    """And takes no time that makes no sense."""
    async with switched() as (post, is_there):
        for wrong in ({}, {"token": "x"}, {"token": ""}):
            assert await post("/store/stop", seconds=5, **wrong) == 403
            assert await post("/store/start", **wrong) == 403
        for seconds in ("", "0", "-1", "nan", "1e9"):
            assert await post("/store/stop", token="secret", seconds=seconds) == 400
        assert await is_there()


async def test_a_store_that_is_off_when_all_ends_is_on_again_before():
    """Whoever stops the cluster finds it whole."""
    async with switched() as (post, is_there):
        assert await post("/store/stop", token="secret", seconds=1000) == 200
        await until(is_there, False)
