"""Workers with a real shard of the cache: what they take from it, what they give to it, and what is left when any of
that is cut off."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from prfaas.cluster import NodeId, RegionId
from prfaas.config import CacheConfig
from prfaas.engine.tiny import build_tiny
from prfaas.errors import TransferFailed
from prfaas.node.cache_plan import whole_units
from prfaas.node.worker import Worker
from prfaas.request import AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Cancel, Decode, Destination, Failed, Prefill, PrefillDone, Reserve, Reserved, Tokens
from services.free_ports import free_ports
from tests.integration.cache_peers import CacheWorld, cache_world, metric, open_store_of, until
from tests.integration.kv_pumps import Line
from tests.integration.test_worker import (
    ELSEWHERE,
    HERE,
    LIMITS,
    LIVENESS_S,
    Router,
    at_rest,
    attempt,
    whole_answer,
    worker_on,
)

FAMILIES = ("cost_model", "kimi_linear", "qwen3_next", "qwen3")
SETTINGS = CacheConfig(lookup_timeout_s=5.0, get_timeout_s=10.0, put_timeout_s=10.0)
ROOM = 64 << 20
#: What a transfer takes on a slow line: long enough to do something about it when half of it is there.
SLOW_S = 4.0
SALT = b"salt of a tenant"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp("models") / family
            build_tiny(built[family], family)
        return built[family]

    return build


@asynccontextmanager
async def cached_worker(
    world: CacheWorld,
    name: NodeId = HERE,
    region: str = "b",
    settings: CacheConfig = SETTINGS,
    pool_bytes: int = ROOM,
) -> AsyncIterator[Worker]:
    """One that sees a shard of its region."""
    store, limits = open_store_of(world.store), replace(LIMITS, max_prefills=16, max_sequences=16)
    async with worker_on(
        world.model_dir, name, limits, region=region, pool_bytes=pool_bytes, store=store, cache=settings
    ) as worker:
        try:
            yield worker
        finally:
            await store.close()


async def sees_pool(worker: Worker, region: str) -> None:
    async def there() -> bool:
        assert worker.pool is not None
        return bool(worker.pool.shards(RegionId(region)))

    await until(there)


@pytest.fixture(params=["cost_model", "kimi_linear"])
async def world(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> AsyncIterator[CacheWorld]:
    async with cache_world(models(request.param)) as made:
        yield made


@pytest.fixture
async def quick(models: Callable[[str], Path]) -> AsyncIterator[CacheWorld]:
    async with cache_world(models("cost_model")) as made:
        yield made


def ids(tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(3, 500, tokens).astype("<u4").tobytes()


def reserve(
    worker: Worker,
    prompt: bytes,
    source: NodeId = HERE,
    *,
    max_tokens: int = 4,
    salt: bytes = SALT,
    use_cache: bool = True,
) -> Reserve:
    return Reserve(
        request_id=RequestId("r"),
        prompt=prompt,
        sampling=Sampling(max_tokens=max_tokens),
        source_node=source,
        source_region=RegionId("a"),
        source_namespace=worker.info.namespace,
        deadline_s=60.0,
        salt=salt,
        tenant="t",
        use_cache=use_cache,
    )


def prefill(
    prompt: bytes, destination: Destination | None = None, *, pull: str = "", use_cache: bool = True
) -> Prefill:
    return Prefill(
        request_id=RequestId("r"),
        prompt=prompt,
        destination=destination,
        deadline_s=60.0,
        salt=SALT,
        tenant="t",
        use_cache=use_cache,
        pull_region=RegionId(pull) if pull else None,
    )


def destination_of(reserved: Reserved) -> Destination:
    return Destination(
        node=HERE,
        incarnation=reserved.incarnation,
        kv_address=reserved.kv_address,
        generation=reserved.generation,
        region=RegionId("b"),
        permit=reserved.permit,
        held_tokens=reserved.held_tokens,
    )


async def served_here(
    worker: Worker, prompt: bytes, *, max_tokens: int = 4, salt: bytes = SALT, use_cache: bool = True
) -> tuple[PrefillDone, bytes]:
    router, one = Router(worker), attempt()
    command = reserve(worker, prompt, max_tokens=max_tokens, salt=salt, use_cache=use_cache)
    assert isinstance(await router.ask(one, command), Reserved)
    done = await router.ask(one, prefill(prompt, use_cache=use_cache))
    assert isinstance(done, PrefillDone)
    router.send(one, Decode())
    tokens, _ = await whole_answer(router, one)
    return done, tokens


async def served_from(
    worker: Worker, other: Worker, prompt: bytes, *, max_tokens: int = 4, pull: str = ""
) -> tuple[Reserved, PrefillDone, bytes]:
    here, there, one = Router(worker), Router(other), attempt()
    reserved = await here.ask(one, reserve(worker, prompt, ELSEWHERE, max_tokens=max_tokens))
    assert isinstance(reserved, Reserved)
    done = await there.ask(one, prefill(prompt, destination_of(reserved), pull=pull))
    assert isinstance(done, PrefillDone), done
    here.send(one, Decode())
    tokens, _ = await whole_answer(here, one)
    return reserved, done, tokens


async def kept(worker: Worker) -> None:
    """What it had for the cache is there, or was given up."""

    async def quiet() -> bool:
        assert worker.publisher is not None
        return not worker.publisher.running

    await until(quiet)
    await at_rest(worker)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_next_turn_goes_on_behind_the_answer(models: Callable[[str], Path], family: str):
    """Prompt and answer of a turn are in the cache at its end, so that the next one computes what is new; its tokens
    are those of a run without a cache."""
    async with cache_world(models(family)) as world:
        await world.shard()
        async with cached_worker(world) as worker:
            await sees_pool(worker, "b")
            prompt = ids(600)
            first, answer = await served_here(worker, prompt, max_tokens=100)
            assert (first.cached_tokens, first.prefill_tokens) == (0, 599)
            await kept(worker)
            turn = prompt + answer + ids(70, seed=1)
            second, tokens = await served_here(worker, turn)
            assert second.cached_tokens == whole_units(600 + 100 - 1)
            assert second.prefill_tokens == len(turn) // 4 - 1 - second.cached_tokens
            plain, expected = await served_here(worker, turn, use_cache=False)
            assert plain.cached_tokens == 0 and tokens == expected
            await kept(worker)


async def test_only_what_is_missing_crosses(world: CacheWorld):
    """The second time a prompt comes, the decode node has its KV, and the prefill node its state: rows of the last
    partial block are sent, with the states."""
    await world.shard()
    await world.shard(shard="pool-a", region="a")
    async with cached_worker(world) as worker, cached_worker(world, ELSEWHERE, "a") as other:
        await sees_pool(worker, "b")
        await sees_pool(other, "a")
        prompt, layout = ids(900), worker.info.layout
        reserved, done, expected = await served_from(worker, other, prompt)
        assert (reserved.held_tokens, done.cached_tokens, done.kv_bytes) == (0, 0, layout.size_bytes(899))
        for each in (worker, other):
            await kept(each)
        reserved, done, tokens = await served_from(worker, other, prompt)
        assert reserved.held_tokens == done.cached_tokens == 896
        assert done.prefill_tokens == 3
        assert done.kv_bytes == layout.state_bytes + 3 * layout.bytes_per_token
        assert tokens == expected
        for each in (worker, other):
            await kept(each)


async def test_a_long_prompt_is_kept_in_pieces(quick: CacheWorld):
    """On one of several shards, with a state every 8192 tokens. A prompt that leaves it elsewhere goes on from the last
    of these, and leaves a state where it left, from which the next such prompt goes on (R6)."""
    for number in range(2):
        await quick.shard(shard=f"pool-{number}")
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        base = ids(20_000)
        first, expected = await served_here(worker, base)
        assert first.cached_tokens == 0
        await kept(worker)
        again, tokens = await served_here(worker, base)
        assert again.cached_tokens == whole_units(19_999) and tokens == expected
        common = base[: 10_000 * 4]
        for seed, cached in ((1, 8192), (2, whole_units(10_000))):
            prompt = common + ids(500, seed=seed)
            done, tokens = await served_here(worker, prompt)
            assert done.cached_tokens == cached
            _, expected = await served_here(worker, prompt, use_cache=False)
            assert tokens == expected
            await kept(worker)


async def test_one_question_finds_prefix_and_junction(world: CacheWorld):
    """A short prompt costs one look-up, which tells where to resume and where the prompt leaves what is known (R6)."""
    [port] = free_ports(1)
    await world.shard("--metrics-port", str(port))
    async with cached_worker(world) as worker:
        await sees_pool(worker, "b")
        await served_here(worker, ids(600))
        await kept(worker)
        for cached in (0, 384):
            before = await metric(port, "prfaas_pool_lookups_total")
            done, _ = await served_here(worker, ids(400)[: 400 * 4] + ids(300, seed=cached + 1))
            await kept(worker)
            assert done.cached_tokens == cached
            assert await metric(port, "prfaas_pool_lookups_total") == before + 1


async def test_tenants_share_nothing(quick: CacheWorld):
    """Equal prompts under another salt are not found."""
    await quick.shard()
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        await served_here(worker, ids(600))
        await kept(worker)
        other, _ = await served_here(worker, ids(600), salt=b"of another")
        again, _ = await served_here(worker, ids(600))
        assert (other.cached_tokens, again.cached_tokens) == (0, 576)
        await kept(worker)


async def test_a_queue_counts_what_is_to_be_computed(quick: CacheWorld):
    """Of a cached prompt only the rest stands in the queue, and in what the node reports."""
    await quick.shard()
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        await served_here(worker, ids(6000))
        await kept(worker)
        most = 0
        router, one = Router(worker), attempt()
        await router.ask(one, reserve(worker, ids(6000)))
        router.send(one, prefill(ids(6000)))
        done = asyncio.ensure_future(router.answer(one))
        while not done.done():
            most = max(most, worker.load().queued_prefill_tokens)
            await asyncio.sleep(0)
        assert isinstance(done.result(), PrefillDone)
        assert 0 < most == 6000 - whole_units(5999)
        router.send(one, Cancel())
        await kept(worker)


async def test_a_longer_prefix_is_pulled_from_another_region(quick: CacheWorld):
    """Where the route says so, and where the other region has more; it is then in the own region's cache as well."""
    await quick.shard()
    await quick.shard(shard="pool-a", region="a")
    async with cached_worker(quick) as worker, cached_worker(quick, ELSEWHERE, "a") as other:
        for region in ("a", "b"):
            await sees_pool(worker, region)
            await sees_pool(other, region)
        prompt = ids(900)
        _, expected = await served_here(worker, prompt)
        await kept(worker)
        _, done, tokens = await served_from(worker, other, prompt, pull="b")
        assert done.cached_tokens == 896 and done.pulled_bytes == other.info.layout.size_bytes(896)
        assert tokens == expected
        for each in (worker, other):
            await kept(each)
        _, done, _ = await served_from(worker, other, prompt, pull="b")
        assert (done.cached_tokens, done.pulled_bytes) == (896, 0)
        for each in (worker, other):
            await kept(each)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "frozen"])
async def test_without_its_pool_a_worker_serves_on(quick: CacheWorld, how: signal.Signals):
    """Dead or frozen, a shard costs no request its answer, and no more time than a look-up may take."""
    shard = await quick.shard()
    settings = replace_settings(lookup_timeout_s=0.3, get_timeout_s=1.0)
    async with cached_worker(quick, settings=settings) as worker:
        await sees_pool(worker, "b")
        _, expected = await served_here(worker, ids(600))
        await kept(worker)
        known = worker.cache_books.puts["known"]
        shard.process.send_signal(how)
        try:
            for _ in range(3):
                done, tokens = await served_here(worker, ids(600))
                assert (done.cached_tokens, done.prefill_tokens, tokens) == (0, 599, expected)
                await kept(worker)
        finally:
            if how is signal.SIGSTOP:
                shard.process.send_signal(signal.SIGCONT)
        books = worker.cache_books
        assert books.lookups == {"miss": 1, "failed": 3}, "what was not answered is no miss"
        assert books.looked_up_tokens == 599
        assert books.puts["failed"] and (books.puts["known"], books.puts["refused"]) == (known, 0)


def replace_settings(**changed: float) -> CacheConfig:
    fields = {name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__}
    return CacheConfig(**(fields | changed))


async def test_a_prefix_that_is_lost_after_it_was_promised_fails_the_decode(quick: CacheWorld):
    """The router was told that it need not be sent, so nobody else has it: it tries again without the cache."""
    shard = await quick.shard()
    settings = replace_settings(get_timeout_s=1.0)
    async with cached_worker(quick, settings=settings) as worker, cached_worker(quick, ELSEWHERE, "a") as other:
        await sees_pool(worker, "b")
        prompt = ids(6000)
        _, expected = await served_here(worker, prompt)
        await kept(worker)
        here, there, one = Router(worker), Router(other), attempt()
        here.send(one, reserve(worker, prompt, ELSEWHERE))
        await leased(worker)  # and has not been asked for it yet
        shard.process.send_signal(signal.SIGSTOP)
        reserved = await here.answer(one)
        assert isinstance(reserved, Reserved) and reserved.held_tokens == whole_units(5998)
        await shard.kill()
        assert isinstance(await there.ask(one, prefill(prompt, destination_of(reserved))), PrefillDone)
        failed = await here.ask(one, Decode())
        assert isinstance(failed, Failed) and isinstance(failed.error, TransferFailed)
        again = attempt()
        plain = await here.ask(again, reserve(worker, prompt, ELSEWHERE, use_cache=False))
        assert isinstance(plain, Reserved) and plain.held_tokens == 0
        assert isinstance(await there.ask(again, prefill(prompt, destination_of(plain), use_cache=False)), PrefillDone)
        here.send(again, Decode())
        tokens, _ = await whole_answer(here, again)
        assert tokens == expected
        for each in (one, again):
            here.send(each, Cancel())
            there.send(each, Cancel())
        for each_worker in (worker, other):
            await kept(each_worker)


@pytest.mark.parametrize(
    ("family", "arrived"),
    [
        ("qwen3", "nothing"),
        ("kimi_linear", "half"),
        pytest.param("qwen3", "half", marks=pytest.mark.slow),
        pytest.param("kimi_linear", "nothing", marks=pytest.mark.slow),
    ],
)
async def test_a_local_prefill_goes_on_from_what_is_held(models: Callable[[str], Path], family: str, arrived: str):
    """When the rest is lost on its way, what the cache had and what had come on top are not computed again. A model
    with states resumes where the cache has one."""
    async with cache_world(models(family)) as world:
        await world.shard()
        async with cached_worker(world) as worker, cached_worker(world, ELSEWHERE, "a") as other:
            await sees_pool(worker, "b")
            prompt, layout = ids(1000) + ids(1500, seed=1), worker.info.layout
            await served_here(worker, prompt[: 1000 * 4])
            await kept(worker)
            here, there, one = Router(worker), Router(other), attempt()
            before = worker._pump.load.received_bytes_total
            reserved = await here.ask(one, reserve(worker, prompt, ELSEWHERE))
            assert isinstance(reserved, Reserved) and reserved.held_tokens == whole_units(1000)
            held = layout.bytes_per_token * reserved.held_tokens
            rest = layout.bytes_per_token * (2499 - reserved.held_tokens) + layout.state_bytes
            pump = SimpleNamespace(port=int(worker.place.kv_addresses[""].rpartition(":")[2]))
            line = Line(pump, bytes_per_s=rest / SLOW_S)
            if arrived == "half":
                there.send(one, prefill(prompt, replace(destination_of(reserved), kv_address=line.address)))
                async with asyncio.timeout(LIVENESS_S):
                    while worker._pump.load.received_bytes_total - before < held + rest // 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                there.send(one, Cancel())
            done = await here.ask(one, prefill(prompt))
            assert isinstance(done, PrefillDone)
            assert done.cached_tokens == whole_units(1000 if layout.state_bytes == 0 else 999)
            if arrived == "half" and not layout.state_bytes:
                assert 0 < done.prefill_tokens < 2499 - done.cached_tokens
            else:
                assert done.prefill_tokens == 2499 - done.cached_tokens
            here.send(one, Decode())
            tokens, _ = await whole_answer(here, one)
            line.close()
            _, expected = await served_here(worker, prompt, use_cache=False)
            assert tokens == expected
            for each in (worker, other):
                await kept(each)


async def leased(worker: Worker) -> None:
    """Until a look-up has found something."""
    assert worker.pool is not None
    async with asyncio.timeout(LIVENESS_S):
        while not worker.pool._held:  # noqa: ASYNC110
            await asyncio.sleep(0)


STAGES = ("looking up", "bringing", "prefilling", "prefilled", "decoding", "lingering")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "session"])
async def test_field_A7_an_end_at_any_stage_gives_everything_back(quick: CacheWorld, stage: str, how: str):
    """Leases, spans, sequences and admission: wherever an attempt is cut off, nothing of it stays behind."""
    await quick.shard()
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        await served_here(worker, ids(4000))
        await kept(worker)
        router, one = Router(worker), attempt()
        await router.ask(one, reserve(worker, ids(4000) + ids(3000, seed=2), max_tokens=200))
        await until_stage(worker, router, one, stage)
        if how == "cancel":
            router.send(one, Cancel())
        else:
            router.close()
        await kept(worker)
        assert worker.pool is not None

        async def let_go() -> bool:
            return not worker.pool._held if worker.pool else True

        await until(let_go)
        done, _ = await served_here(worker, ids(4000))
        assert done.cached_tokens == whole_units(3999)
        await kept(worker)


async def until_stage(worker: Worker, router: Router, one: AttemptId, stage: str) -> None:
    prompt = ids(4000) + ids(3000, seed=2)
    router.send(one, prefill(prompt))
    tenure = worker._tenures[one]
    async with asyncio.timeout(LIVENESS_S):
        match stage:
            case "looking up":
                await asyncio.sleep(0)
            case "bringing":
                while not tenure.in_pump:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            case "prefilling":
                while not tenure.in_engine:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            case _:
                assert isinstance(await router.answer(one), PrefillDone)
    if stage in ("decoding", "lingering"):
        assert isinstance(await router.ask(one, Decode()), Tokens)
    if stage == "lingering":
        await whole_answer(router, one)
        assert worker.lingering


async def test_a_drain_does_not_wait_for_the_cache(quick: CacheWorld):
    """What is only here to be put into a cache that takes its time goes at once."""
    shard = await quick.shard()
    settings = replace_settings(put_timeout_s=LIVENESS_S * 4, lookup_timeout_s=LIVENESS_S * 4)
    async with cached_worker(quick, settings=settings) as worker:
        await sees_pool(worker, "b")
        done, _ = await served_here(worker, ids(600), max_tokens=100)
        shard.process.send_signal(signal.SIGSTOP)
        try:
            router, one = Router(worker), attempt()
            assert isinstance(await router.ask(one, reserve(worker, ids(300), use_cache=False)), Reserved)
            router.send(one, Cancel())
            async with asyncio.timeout(LIVENESS_S):
                await worker.drain(LIVENESS_S)
            await at_rest(worker)
        finally:
            shard.process.send_signal(signal.SIGCONT)
        assert done.cached_tokens == 0


async def test_more_than_it_may_put_at_once_is_let_go(quick: CacheWorld):
    """The number of sequences that linger for the cache is bounded, and nobody waits for a place."""
    await quick.shard()
    async with cached_worker(quick, settings=replace_settings(max_puts=1)) as worker:
        await sees_pool(worker, "b")
        [pump] = [child for child in psutil.Process().children() if "prfaas.transfer.pump" in child.cmdline()]
        pump.suspend()  # what is put needs a span, what is computed here does not
        try:
            await served_here(worker, ids(600))
            await served_here(worker, ids(600, seed=1))
            assert worker.publisher is not None and worker.publisher.running == 1
            assert worker.cache_books.puts["dropped"] > 0
        finally:
            pump.resume()
        await kept(worker)
        assert worker.cache_books.puts["published"] > 0


async def test_without_room_for_it_nothing_is_put_or_brought(quick: CacheWorld):
    """A worker whose pump has no span for what it computed, or for what the cache has, serves as if there was none."""
    await quick.shard()
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        _, expected = await served_here(worker, ids(6000))
        await kept(worker)
    async with cached_worker(quick, pool_bytes=1 << 18) as small:
        await sees_pool(small, "b")
        done, tokens = await served_here(small, ids(6000))
        assert (done.cached_tokens, done.prefill_tokens, tokens) == (0, 5999, expected)
        await served_here(small, ids(6000, seed=1))
        await kept(small)
        assert small.cache_books.puts["dropped"] and not small.cache_books.puts["published"]
        assert small.cache_books.gets["failed"] == 1
        async with cached_worker(quick, ELSEWHERE) as roomy:
            await sees_pool(roomy, "b")
            await served_here(roomy, ids(6000, seed=1))
            await kept(roomy)
            assert roomy.cache_books.puts["published"], "what was offered in vain keeps others from putting it"


async def test_what_an_engine_has_lost_can_be_put_again_at_once(quick: CacheWorld):
    """The pool made room for it, and is told that it will not come."""
    await quick.shard()
    async with cached_worker(quick) as worker:
        await sees_pool(worker, "b")
        [pump] = [child for child in psutil.Process().children() if "prfaas.transfer.pump" in child.cmdline()]
        pump.suspend()  # a put waits for its span
        try:
            router, one = Router(worker), attempt()
            assert isinstance(await router.ask(one, reserve(worker, ids(600))), Reserved)
            assert isinstance(await router.ask(one, prefill(ids(600))), PrefillDone)

            async def offered() -> bool:
                return bool(worker._tenures[one].in_pump)

            await until(offered)
            await worker._engine.cancel(one)
        finally:
            pump.resume()

        async def failed() -> bool:
            return worker.cache_books.puts["failed"] > 0

        await until(failed)
        router.send(one, Cancel())
        await kept(worker)
        await served_here(worker, ids(600))
        await kept(worker)
        done, _ = await served_here(worker, ids(600))
        assert done.cached_tokens == whole_units(599)
        await kept(worker)
