"""An engine that talks and does nothing is found out."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from prfaas.engine.messages import Command, Event, Load, ServerLoad
from prfaas.errors import PeerUnavailable
from prfaas.ipc import AsyncChannel, Channel
from prfaas.node.engine_client import EngineClient
from prfaas.node.engine_pulse import Labour

SILENCE_S, LIVENESS_S, REPORT_S = 0.4, 20.0, 0.02


def load(*, queued: int = 0, active: int = 0, prefilled: int = 0, steps: int = 0) -> Load:
    return Load(
        queued_prefill_tokens=queued,
        queued_sequences=0,
        active_sequences=active,
        kept_sequences=0,
        prefill_tokens_total=prefilled,
        decode_forwarded_tokens_total=0,
        prefill_busy_s_total=0.0,
        decode_busy_s_total=0.0,
        decode_steps_total=steps,
    )


@pytest.mark.parametrize(
    ("before", "after", "beats"),
    [
        (load(), load(), True),
        (load(queued=10), load(queued=10), False),
        (load(active=1), load(active=1), False),
        (load(queued=10), load(queued=9, prefilled=1), True),
        (load(active=1), load(active=1, steps=1), True),
        (load(queued=10), load(), True),
    ],
)
def test_work_that_is_done_or_none_that_is_left_is_a_sign_of_life(before: Load, after: Load, beats: bool):
    """A queue alone is none, however often it is reported."""
    labour = Labour()
    labour.beats(before)
    assert labour.beats(after) is beats


@pytest.mark.parametrize("moved", ["prompt_tokens_total", "generated_tokens_total", "kv_usage_ratio"])
def test_what_the_engines_server_does_for_others_is_a_sign_of_life(moved: str):
    """Ours wait behind it. That requests come to it is none."""
    server = ServerLoad(
        running=1,
        waiting=1,
        kv_usage_ratio=0.25,
        prompt_tokens_total=9,
        generated_tokens_total=9,
        prefix_queried_tokens_total=0,
        prefix_hit_tokens_total=0,
    )
    waiting = msgspec.structs.replace(load(queued=10), server=server)
    labour = Labour()
    labour.beats(waiting)
    assert not labour.beats(msgspec.structs.replace(waiting, server=msgspec.structs.replace(server, waiting=2)))
    later = msgspec.structs.replace(server, **{moved: getattr(server, moved) + 1})
    assert labour.beats(msgspec.structs.replace(waiting, server=later))


@dataclass
class Talking:
    """An engine that reports again and again what it is told to."""

    client: EngineClient
    says: Load


@asynccontextmanager
async def talking() -> AsyncIterator[Talking]:
    ours, theirs = socket.socketpair()
    channel: AsyncChannel[Event] = await AsyncChannel.over(ours, Event)  # type: ignore[arg-type]
    engine = Channel[Command](theirs, Command)  # type: ignore[arg-type]
    told = Talking(EngineClient("w", channel), load())

    async def talk() -> None:
        while True:
            engine.send(told.says)
            await asyncio.sleep(REPORT_S)

    tasks = [asyncio.create_task(talk()), asyncio.create_task(told.client.run())]
    try:
        yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel.close()
        theirs.close()


async def test_field_C15_an_engine_that_talks_and_does_nothing_is_stuck():
    """While it is idle it may be so for ever; with work it has its time."""
    async with talking() as engine, asyncio.timeout(LIVENESS_S):
        watching = asyncio.create_task(engine.client.progress.watch(SILENCE_S))
        await asyncio.sleep(3 * SILENCE_S)  # not a condition: nothing may happen meanwhile
        assert not watching.done()
        engine.says = load(queued=100)
        with pytest.raises(PeerUnavailable, match=f"it has work and does none of it for {SILENCE_S:g} s"):
            await watching
