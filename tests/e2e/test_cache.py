"""The prefix cache of a whole cluster: later turns of a conversation compute what is new, and say what they would have
said without it."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from services.local_cluster import PD_REGION, LocalCluster, Plan
from tests.e2e.caches import UNIT, cached, grown, objects, units
from tests.e2e.client import at_rest, complete, eventually, metrics, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

ModelDir = Callable[[str], Path]
Reference = Callable[[str], Alone]
#: tests/integration/test_worker_cache.py has workers with each of them.
LOCAL = (
    "cost_model",
    "kimi_linear",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_next", "qwen3")),
)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=LOCAL)
async def local(
    request: pytest.FixtureRequest, start_embedded: StartCluster, model_dir: ModelDir
) -> AsyncIterator[tuple[str, LocalCluster]]:
    """A cluster in which a PD node prefills whatever it decodes: family and cluster."""
    plan = Plan(
        model_dir=model_dir(request.param), threshold_tokens=1 << 20, prefill_workers=0, pd_roles=("mixed",), pools=1
    )
    async with start_embedded(plan) as cluster:
        yield request.param, cluster


async def test_the_next_turn_resumes_behind_the_answer(local: tuple[str, LocalCluster], alone: Reference):
    """Prompt and answer of a turn are cached at its end; the next turn begins to compute behind them."""
    family, cluster = local
    model = alone(family)
    kv, states = await objects(cluster, PD_REGION), await objects(cluster, PD_REGION, "state")
    first = await complete(cluster, token_ids(600, seed=1), 100)
    assert first.token_ids == model.answer(token_ids(600, seed=1), 100) and cached(first) == 0
    turns = 2 if model.engine.info.layout.state_bytes else 0
    await eventually(partial(grown, cluster, PD_REGION, kv + units(699) // UNIT, states + turns))
    turn = token_ids(600, seed=1) + first.token_ids + token_ids(80, seed=2)
    second = await complete(cluster, turn, 20)
    assert cached(second) == units(600 + 100 - 1)
    assert second.token_ids == model.answer(turn, 20)
    await eventually(partial(at_rest, cluster))
    samples = await metrics(cluster, "decode-0")
    assert total(samples, "prfaas_worker_cache_skipped_tokens_total") >= cached(second)
    assert total(samples, "prfaas_worker_cache_hit_tokens_total", kind="joint") >= cached(second)
    assert total(samples, "prfaas_worker_cache_looked_up_tokens_total") >= 599 + len(turn) - 1


async def test_an_edited_history_equals_a_cold_run(local: tuple[str, LocalCluster], alone: Reference):
    """One token changed in the middle: the cache is of use up to there, and not a token further."""
    family, cluster = local
    kv = await objects(cluster, PD_REGION)
    prompt = token_ids(700, seed=3)
    await complete(cluster, prompt, 70)
    await eventually(partial(grown, cluster, PD_REGION, kv + units(769) // UNIT, 0))
    edited = [*prompt[:333], prompt[333] ^ 1, *prompt[334:]]
    done = await complete(cluster, edited, 20)
    assert cached(done) <= units(333)
    assert done.token_ids == alone(family).answer(edited, 20)
    # Where the two part there is a state now: the next one that is edited there resumes there (R6).
    await eventually(partial(at_rest, cluster))
    again = [*edited[:340], edited[340] ^ 1, *edited[341:]]
    await eventually(partial(grown, cluster, PD_REGION, kv + (units(769) + units(699) - units(333)) // UNIT, 0))
    done = await complete(cluster, again, 20)
    assert cached(done) == units(333)
    assert done.token_ids == alone(family).answer(again, 20)


@pytest.mark.slow
async def test_a_pool_that_dies_costs_no_request(start_embedded: StartCluster, model_dir: ModelDir, alone: Reference):
    """kill -9 in the middle of puts and gets: whoever was served from it is served without it, and when it is back it
    is used again."""
    family = "kimi_linear"
    plan = Plan(model_dir=model_dir(family), threshold_tokens=0, pools=1)
    async with start_embedded(plan) as cluster:
        prompts = [token_ids(700, seed=10) + token_ids(100, seed=20 + number) for number in range(6)]
        for round_number in range(3):
            for number, prompt in enumerate(prompts):
                done = await complete(cluster, prompt, 8)
                assert done.token_ids == alone(family).answer(prompt, 8)
                if round_number == 1 and number == 2:
                    for name in ("pool-a-0", "pool-b-0"):
                        cluster.processes[name].kill()
                        await cluster.processes[name].wait()
        for name in ("pool-a-0", "pool-b-0"):
            await cluster.start_again(name)
            await eventually(partial(_answers, cluster, name))
        await eventually(partial(_used_again, cluster, prompts[0], alone(family).answer(prompts[0], 8)))
        await eventually(partial(at_rest, cluster))


async def _answers(cluster: LocalCluster, name: str) -> bool:
    """the process is there again"""
    try:
        return bool(await metrics(cluster, name))
    except OSError:
        return False


async def _used_again(cluster: LocalCluster, prompt: list[int], expected: list[int]) -> bool:
    """a prompt is found in the cache"""
    done = await complete(cluster, prompt, 8)
    assert done.token_ids == expected
    return cached(done) == units(len(prompt) - 1)
