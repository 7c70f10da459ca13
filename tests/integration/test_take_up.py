"""A transfer that is lost on its way to a worker: what has arrived there is not computed again."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from prfaas.engine.tiny import build_tiny
from prfaas.node.worker import Worker
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Decode, Destination, PrefillDone, Reserved
from tests.integration.kv_pumps import Line
from tests.integration.test_worker import (
    ELSEWHERE,
    HERE,
    LIVENESS_S,
    Router,
    at_rest,
    attempt,
    prefill,
    reserve,
    whole_answer,
    worker_on,
)

TOKENS = 2001
CHUNK_TOKENS = 256
#: What a transfer takes on a slow line: long enough to do something about it when half of it is there.
SLOW_S = 6.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One whose cache is rows only, and one with states."""
    folders = {family: tmp_path_factory.mktemp("models") / family for family in ("qwen3", "kimi_linear")}
    for family, folder in folders.items():
        build_tiny(folder, family)
    return folders


async def expected_answer(worker: Worker) -> list[int]:
    router, alone = Router(worker), attempt()
    await router.ask(alone, reserve(worker, TOKENS))
    await router.ask(alone, prefill(TOKENS))
    router.send(alone, Decode())
    tokens, _ = await whole_answer(router, alone)
    return tokens


async def arrived(worker: Worker, nbytes: int) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while worker._pump.load.received_bytes_total < nbytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def pushing(worker: Worker, here: Router, there: Router, line: Line, one: AttemptId) -> None:
    """Room taken here, and a prefill under way there that pushes its KV through the line."""
    reserved = await here.ask(one, reserve(worker, TOKENS, ELSEWHERE))
    assert isinstance(reserved, Reserved)
    destination = Destination(
        node=HERE,
        incarnation=reserved.incarnation,
        kv_address=line.address,
        generation=reserved.generation,
        permit=reserved.permit,
    )
    there.send(one, prefill(TOKENS, destination))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("kimi_linear", "aborted"),
        ("qwen3", "whole"),
        *[
            pytest.param(family, how, marks=pytest.mark.slow)
            for family, how in (
                ("qwen3", "aborted"),
                ("qwen3", "silent"),
                ("kimi_linear", "silent"),
                ("kimi_linear", "whole"),
            )
        ],
    ],
)
async def test_a_local_prefill_goes_on_from_the_verified_boundary(models: dict[str, Path], family: str, how: str):
    """Whether the sender gave up, nothing comes any more, or everything had arrived by then: the same attempt is
    prefilled here, from the last chunk end that was verified, and gives the same tokens. States are good at the end
    only: without them all is computed anew. Nothing stays behind."""
    async with worker_on(models[family]) as worker, worker_on(models[family], ELSEWHERE) as other:
        expected, layout = await expected_answer(worker), worker.info.layout
        size = layout.size_bytes(TOKENS - 1)
        speed = None if how == "whole" else size / SLOW_S
        line = Line(SimpleNamespace(port=int(worker.place.kv_addresses[""].rpartition(":")[2])), bytes_per_s=speed)
        here, there, one = Router(worker), Router(other), attempt()
        await pushing(worker, here, there, line, one)
        if how == "whole":
            assert isinstance(await there.answer(one), PrefillDone)
        await arrived(worker, size if how == "whole" else size // 2)
        if how == "aborted":
            there.send(one, Cancel())
        elif how == "silent":
            line.stall()
        done = await here.ask(one, prefill(TOKENS))
        assert isinstance(done, PrefillDone)
        computed = done.prefill_tokens
        if how == "whole":
            assert computed == 0
        elif layout.state_bytes:
            assert computed == TOKENS - 1
        else:
            assert 0 < computed < TOKENS - 1 and (TOKENS - 1 - computed) % CHUNK_TOKENS == 0
        here.send(one, Decode())
        tokens, _ = await whole_answer(here, one)
        assert tokens == expected
        there.send(one, Cancel())
        line.close()
        await at_rest(worker)
        await at_rest(other)
