"""A stream whose tokens are diverted, over real token links: it loses its worker, and is diverted again on the next."""

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from prfaas.errors import EngineFailed
from prfaas.flows.story import Moved, Story
from prfaas.live.link_stream import LinkCounters
from prfaas.live.watchdog import Watchdog
from prfaas.request import FinishReason
from prfaas.rpc.commands import Decode, Done, Failed, Reserve, Tokens
from prfaas.scheduling.admission import Admission, AdmissionParams
from services.router.backend import ClusterBackend
from services.router.metrics import RouterMetrics
from services.router.same_tokenizer import SameTokenizer
from tests.integration.link_adapters import TCP
from tests.integration.scripted_worker import ScriptedRuntime
from tests.integration.test_token_link import D0, D1, PATIENCE_S, Router, node, prompt, router, serve_params, serving

PROMPT = prompt(8)


@dataclass
class Client:
    """What came the short way, and what came the long way."""

    short: list[int] = field(default_factory=list)
    long: list[int] = field(default_factory=list)

    def take(self, tokens: bytes, now_s: float) -> bool:
        self.short.append(*struct.unpack("<I", tokens))
        return True


def backend_of(process: Router) -> ClusterBackend:
    metrics = RouterMetrics(
        ["m"], lambda: 0.0, lambda: False, LinkCounters(), Admission(AdmissionParams(max_running=1))
    )
    return ClusterBackend(
        SameTokenizer(lambda: process.view, ""),
        process.ports,
        process.steering,
        serve_params(),
        metrics,
        1,
        lambda tenant: b"salt",
        watchdog=Watchdog(60.0),
    )


def draw(worker: ScriptedRuntime, token: int, first: bool = False) -> None:
    """The worker's engine has a token of its only attempt."""
    [attempt] = [owner for owner, said in worker.sessions[0].heard if isinstance(said, Decode)]
    times = {"first_queue_s": 0.0, "first_step_s": 0.0, "first_took_s": 0.0} if first else {}
    worker.sessions[0].emit(attempt, Tokens(tokens=struct.pack("<I", token), **times))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_the_next_attempt_takes_the_diversion_over():
    """All tokens but the first of each worker go the short way, in order; and the second worker was given those that
    had gone either way."""
    workers = {name: ScriptedRuntime(name, 1, silent=Decode) for name in (D0, D1)}
    async with (
        serving(TCP, workers[D0]) as a,
        serving(TCP, workers[D1]) as b,
        router(TCP, node(D0, a.port), node(D1, b.port)) as process,
    ):
        backend, story, client = backend_of(process), Story(), Client()

        async def read() -> None:
            async with aclosing(backend.complete(PROMPT, story)) as batches:
                async for batch in batches:
                    client.long += struct.unpack(f"<{len(batch.tokens) // 4}I", batch.tokens)
                    if len(client.long) == 1 and not client.short:
                        backend.divert(story, client.take)

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            await until(lambda: story.attempts != [])
            one = workers.pop(story.attempts[0].route.decode)
            [other] = workers.values()
            await one.heard(Decode)
            draw(one, 100, first=True)
            await until(lambda: client.long == [100])
            for token in (101, 102):
                draw(one, token)
            await until(lambda: client.short == [101, 102])
            attempt = await one.heard(Decode)
            one.sessions[0].emit(attempt, Failed(EngineFailed(one.node, "a step failed")))

            attempt = await other.heard(Decode)
            [asked] = [said for _, said in other.sessions[0].heard if isinstance(said, Reserve)]
            assert asked.prompt == PROMPT.prompt + struct.pack("<3I", 100, 101, 102)
            assert asked.sampling.max_tokens == PROMPT.sampling.max_tokens - 3
            draw(other, 103, first=True)
            await until(lambda: client.long == [100, 103])
            for token in (104, 105):
                draw(other, token)
            await until(lambda: client.short == [101, 102, 104, 105])
            other.sessions[0].emit(attempt, Done(reason=FinishReason.STOP, recomputed_tokens=1, output_tokens=3))
            await reading
        assert (story.output_tokens, story.finish, story.moves) == (6, FinishReason.STOP, 1)
        [move] = story.migrations
        assert (move.after_tokens, move.outcome) == (3, Moved.MOVED)
        assert story.last_s is not None and move.since_s < story.last_s <= time.monotonic()
        assert not story.generated and not backend._takes
