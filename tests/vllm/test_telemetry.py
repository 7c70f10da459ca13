"""What an engine process learns of a vLLM server that others started: its cache, its counters, and whether it is the
right one. One server for all."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prfaas.cluster import OWN_PREFIXES
from prfaas.engine.messages import Decode, Finished, Prefill, Prefilled, ServerLoad
from prfaas.engine.vllm.cache_salt import cache_salt
from prfaas.engine.vllm.completions import complete
from prfaas.kvcache.layout import Window, chunk_ends
from prfaas.request import Match
from tests.vllm.attachable import Server, served
from tests.vllm.conftest import MODELS, PYTHON
from tests.vllm.engine import Engine, process
from tests.vllm.prompts import packed, token_ids

pytest.importorskip("zmq", reason="pyzmq comes with the extra vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]

#: Of the server: fewer than a unit of ours, so that each unit is found.
BLOCK, LENGTH, OUTPUT = 32, 1300, 24
HITS, CACHED = "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_total"
GENERATED = "vllm:generation_tokens_total"
SALT, OTHER = b"\x11" * 32, b"\x22" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model_dir: Callable[[str], Path]) -> AsyncIterator[Server]:
    words = (*MODELS["qwen3"], "--block-size", str(BLOCK), "--served-model-name", "somebody's")
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        async with served(PYTHON, model_dir("qwen3"), words, Path(folder)) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server: Server, model_dir: Callable[[str], Path]) -> AsyncIterator[Engine]:
    """Each test has another worker on the same server, one after the other."""
    async with process(sys.executable, model_dir("qwen3"), server.options) as attached:
        yield attached


async def prefilled(engine: Engine, prompt: bytes, attempt: str, salt: bytes, out: Window | None = None) -> Prefilled:
    stop = len(prompt) // 4 - 1
    ends = chunk_ends(stop, engine.info.chunk_tokens)
    told = await engine.told(Prefill(attempt=attempt, prompt=prompt, stop=stop, ends=ends, out=out, salt=salt))
    assert isinstance(told.end, Prefilled), told.end
    return told.end


async def decoded(engine: Engine, prompt: bytes, attempt: str, **fields: Any) -> tuple[list[int], int]:
    fields = {"tokens": 0, "salt": b""} | fields
    told = await engine.told(Decode(attempt=attempt, prompt=prompt, max_tokens=OUTPUT, **fields))
    assert isinstance(told.end, Finished), told.end
    return told.tokens, told.end.recomputed_tokens


def in_units(tokens: int) -> int:
    return tokens // 64 * 64


async def test_what_was_prefilled_is_in_the_index_and_is_gone_on_from(engine: Engine, server: Server) -> None:
    """For its own tenant and nobody else: found as far as the server has it, not computed again, and so reported; the
    answer is the same, from a window too that was filled out of the server's cache."""
    assert OWN_PREFIXES in engine.info.capabilities
    prompt, window = packed(token_ids(LENGTH, seed=1)), Window(0, LENGTH - 1, 0, state=True)
    alone, _ = await decoded(engine, prompt, "alone")
    assert engine.finds(prompt, SALT) == Match()
    cold = await prefilled(engine, prompt, "cold", SALT)
    assert (cold.tokens, cold.cached) == (LENGTH - 1, 0)
    await engine.until(lambda: engine.finds(prompt, SALT).kv == in_units(LENGTH - 1))
    hits, cached = await server.counted(HITS), await server.counted(CACHED)
    warm = await prefilled(engine, prompt, "warm", SALT, window)
    assert warm.cached == (LENGTH - 2) // BLOCK * BLOCK
    assert warm.tokens == LENGTH - 1 - warm.cached
    await server.counts(HITS, hits + warm.cached)
    await server.counts(CACHED, cached + warm.cached)
    assert (await prefilled(engine, prompt, "other", OTHER)).cached == 0
    assert await decoded(engine, prompt, "there", tokens=LENGTH - 1, held=(window,)) == (alone, 1)
    changed = packed([*token_ids(LENGTH, seed=1)[:700], *token_ids(600, seed=9)])
    assert engine.finds(changed, SALT).kv == in_units(700)
    assert (await prefilled(engine, changed, "changed", SALT)).cached == 700 // BLOCK * BLOCK


async def test_an_answer_is_in_the_index_too(engine: Engine) -> None:
    """The next turn of a chat goes on behind it."""
    prompt = packed(token_ids(LENGTH, seed=2))
    answer, _ = await decoded(engine, prompt, "turn", salt=SALT)
    whole = prompt + packed(answer)
    # The last token drawn was never fed.
    await engine.until(lambda: engine.finds(whole, SALT).kv == in_units((LENGTH + OUTPUT - 1) // BLOCK * BLOCK))


async def test_a_worker_that_comes_later_learns_what_is_there(engine: Engine) -> None:
    """By asking for what was published before it came."""
    prompt = packed(token_ids(LENGTH, seed=1))
    await engine.until(lambda: engine.finds(prompt, SALT).kv == in_units(LENGTH - 1))
    assert (await prefilled(engine, prompt, "again", SALT)).cached == (LENGTH - 2) // BLOCK * BLOCK


async def server_answers(server: Server, seed: int, tokens: int = 4, salt: str | None = None) -> None:
    """For somebody else."""
    body = {"model": "somebody's", "prompt": token_ids(LENGTH, seed), "max_tokens": tokens, "ignore_eos": True}
    async for _ in complete(server.api, body | ({"cache_salt": salt} if salt else {})):
        pass


async def test_the_load_counts_the_requests_of_others(engine: Engine, server: Server) -> None:
    """They run beside ours, and hold memory; when they are over nothing is left of them."""

    def told() -> ServerLoad | None:
        return engine.load.server if engine.load is not None else None

    others = [asyncio.ensure_future(server_answers(server, seed, tokens=3000)) for seed in (40, 41)]
    await engine.until(lambda: (load := engine.load) is not None and load.others_running == 2)
    load = told()
    assert load is not None and load.running == 2 and load.kv_usage_ratio > 0
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await engine.until(lambda: (load := told()) is not None and not load.running and load.kv_usage_ratio == 0)
    assert engine.load is not None and engine.load.others_running == engine.load.others_waiting == 0
    prompts, generated = await server.counted("vllm:prompt_tokens_total"), await server.counted(GENERATED)
    load = told()
    assert load is not None and (load.prompt_tokens_total, load.generated_tokens_total) == (prompts, generated)
    await decoded(engine, packed(token_ids(LENGTH, seed=3)), "one", salt=SALT)
    await engine.until(lambda: (now := told()) is not None and now.generated_tokens_total == generated + OUTPUT)


async def test_what_others_put_under_a_tenants_salt_is_found_as_well(engine: Engine, server: Server) -> None:
    """The salt makes it the tenant's, not who sent it."""
    await server_answers(server, seed=50, salt=cache_salt(SALT))
    await engine.until(lambda: engine.finds(packed(token_ids(LENGTH, seed=50)), SALT).kv >= in_units(LENGTH - 1))


@pytest.mark.parametrize("wrong", ["model", "server", "bridge"])
async def test_what_does_not_fit_is_refused(
    wrong: str, server: Server, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """A server with another model, none at all, and one whose connector was told another place, or that has none: the
    process ends, and says what is wrong."""
    folder, options = model_dir("qwen3"), list(server.options)
    match wrong:
        case "model":
            folder, says = tmp_path / "other", "they must be one folder"
            shutil.copytree(model_dir("qwen3"), folder)
        case "server":
            options[1], says = str(server.folder / "nobody"), "has answered"
        case _:
            options[3], says = str(server.folder / "elsewhere"), "no connector of ours"
    log = tmp_path / "log"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LONELY, str(folder), *options),
        stderr=log.open("wb"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert await asyncio.wait_for(child.wait(), 120)
    assert says in log.read_text()


#: An engine process whose node hears nothing.
LONELY = """
import os, socket, sys
from prfaas.engine.vllm import process
ours, theirs = socket.socketpair()
pool = os.memfd_create("pool")
os.ftruncate(pool, 1 << 20)
places = ["--fd", str(theirs.detach()), "--pool-fd", str(pool)]
sys.argv = ["process", *places, "--model", *sys.argv[1:]]
process.main()
"""
