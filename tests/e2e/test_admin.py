"""The admin API and its commands against a live cluster."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.http_client import ask
from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import complete, eventually, metrics, openai_client, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sesame"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(start: StartCluster, model_dir: Callable[[str], Path]) -> AsyncIterator[LocalCluster]:
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=1000, admin_key=KEY, rebalance=False)
    async with start(plan) as running:
        yield running


async def call(
    cluster: LocalCluster, method: str, path: str, body: object = None, *, key: str = KEY
) -> tuple[int, Any]:
    url = f"{cluster.admin['router']}{path}"
    status, answer = await asyncio.to_thread(ask, method, url, key=key, body=body)
    return status, json.loads(answer)


async def prfaas(cluster: LocalCluster, *arguments: str, code: int = 0) -> str:
    """What a command prints; on an error, to stderr."""
    command = [sys.executable, "-m", "services.cli", *arguments, "--admin", cluster.admin["router"], "--key", KEY]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


async def test_without_the_key_nothing_is_told_or_done(cluster: LocalCluster):
    """No key, another key, whatever the path: 401, and the endpoint's own port knows no admin API at all."""
    for key in ("", "wrong", KEY + "x"):
        for method, path in (("GET", "/admin/v1/workers"), ("DELETE", "/admin/v1/threshold"), ("GET", "/nothing")):
            status, answer = await call(cluster, method, path, key=key)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, _ = await asyncio.to_thread(ask, "GET", f"{cluster.endpoint}/admin/v1/workers", key=KEY)
    assert status == 404


async def test_workers_are_listed_as_they_are(cluster: LocalCluster):
    """Role, share, phase and load of each."""
    status, told = await call(cluster, "GET", "/admin/v1/workers")
    workers = {each["id"]: each for each in told["workers"]}
    assert status == 200 and set(workers) == {"prefill-0", "decode-0", "decode-1"}
    assert workers["prefill-0"]["role"] == "prefill" and workers["decode-0"]["kind"] == "pd"
    assert (workers["decode-1"]["phase"], workers["decode-1"]["draining"]) == ("serving", False)
    assert {"decode_steps", "decode_step_sequences", "decode_step_microseconds"} <= workers["decode-0"][
        "counters"
    ].keys()
    shown = await prfaas(cluster, "workers")
    assert all(name in shown for name in workers)
    assert json.loads(await prfaas(cluster, "workers", "--json"))["workers"][0]["id"] == "decode-0"


async def test_a_threshold_is_pinned_and_unpinned(cluster: LocalCluster):
    """For all routers, by the store; routing follows within a report."""

    async def in_force(tokens: int) -> bool:
        """this t is in force"""
        return total(await metrics(cluster, "router"), "prfaas_router_threshold_tokens") == tokens

    assert "pinned: t = 50" in await prfaas(cluster, "threshold", "--pin", "50")
    await eventually(lambda: in_force(50))
    assert (await complete(cluster, token_ids(60), 2)).receipt["path"] == "remote"
    shown = json.loads(await prfaas(cluster, "threshold", "--json"))
    assert (shown["threshold_tokens"], shown["pinned"]["threshold_tokens"]) == (50, 50)
    await prfaas(cluster, "threshold", "--unpin")
    await eventually(lambda: in_force(1000))
    assert (await complete(cluster, token_ids(60), 2)).receipt["path"] == "local"


async def test_pinning_one_setting_keeps_the_other(cluster: LocalCluster):
    """Threshold and mode are pinned by themselves, and unpinned together."""
    await prfaas(cluster, "threshold", "--pin", "100")
    assert "t = 100, mode always" in await prfaas(cluster, "threshold", "--mode", "always")
    assert "t = 200, mode always" in await prfaas(cluster, "threshold", "--pin", "200")
    await prfaas(cluster, "threshold", "--unpin")
    assert (await prfaas(cluster, "threshold", "--pin", "70")).strip() == "pinned: t = 70"
    await prfaas(cluster, "threshold", "--unpin")


async def test_a_mode_is_pinned_and_unpinned(cluster: LocalCluster):
    """Never: even the longest prompt stays."""

    seeds = itertools.count(300)

    async def goes(path: str) -> bool:
        """a long prompt that nobody has cached goes this way"""
        return (await complete(cluster, token_ids(3000, seed=next(seeds)), 2)).receipt["path"] == path

    await prfaas(cluster, "threshold", "--mode", "never")
    await eventually(lambda: goes("local"))
    await prfaas(cluster, "threshold", "--unpin")
    await eventually(lambda: goes("remote"))


async def test_a_worker_is_drained_and_comes_back(cluster: LocalCluster):
    """It takes nothing new, says so, and takes work again afterwards."""

    async def decodes_on(nodes: set[str]) -> bool:
        """requests are decoded on just these nodes"""
        used = {(await complete(cluster, token_ids(50, seed=seed), 2)).receipt["decode"] for seed in range(12)}
        return used == nodes

    await prfaas(cluster, "drain", "decode-1")
    await eventually(lambda: decodes_on({"decode-0"}))
    _, told = await call(cluster, "GET", "/admin/v1/workers")
    assert [each["id"] for each in told["workers"] if each["draining"]] == ["decode-1"]
    assert "last node that decodes" in await prfaas(cluster, "drain", "decode-0", code=1)
    await prfaas(cluster, "drain", "prefill-0")
    await prfaas(cluster, "drain", "prefill-0", "--undo")
    await prfaas(cluster, "drain", "decode-1", "--undo")
    await eventually(lambda: decodes_on({"decode-0", "decode-1"}))


async def test_the_last_decoder_is_drained_by_force_only(cluster: LocalCluster):
    """And who asks meanwhile is told that nodes drain, not that there are none."""

    async def refused() -> bool:
        """requests are refused"""
        return (await asyncio.to_thread(ask, "GET", f"{cluster.endpoint}/ready"))[0] == 503

    async def all_serve() -> bool:
        """both nodes are back in this router's view"""
        _, told = await call(cluster, "GET", "/admin/v1/workers")
        return not any(each["draining"] for each in told["workers"])

    for name in ("decode-0", "decode-1"):
        await prfaas(cluster, "drain", name, "--force")
    await eventually(refused)
    body = {"model": cluster.plan.model_dir.name, "prompt": "hello", "max_tokens": 2}
    status, answer = await asyncio.to_thread(ask, "POST", f"{cluster.endpoint}/v1/completions", body=body)
    assert status == 503 and "all nodes that decode are draining" in answer
    for name in ("decode-0", "decode-1"):
        await prfaas(cluster, "drain", name, "--undo")
    await eventually(all_serve)
    assert not await refused()


async def test_a_node_is_flipped(cluster: LocalCluster):
    """By a plan that all can see, with an epoch."""

    async def roles() -> dict[str, str]:
        _, told = await call(cluster, "GET", "/admin/v1/workers")
        return {each["id"]: each["role"] for each in told["workers"]}

    async def is_now(role: str) -> bool:
        """the node has the role"""
        return (await roles())["decode-0"] == role

    told = json.loads(await prfaas(cluster, "flip", "decode-0", "prefill", "--json"))
    await eventually(lambda: is_now("prefill"))
    _, state = await call(cluster, "GET", "/admin/v1/scheduler")
    assert state["plan"]["epoch"] == told["epoch"] and state["plan"]["shares"]["decode-0"] == 1.0
    assert "last node that decodes" in await prfaas(cluster, "flip", "decode-1", "prefill", code=1)
    await prfaas(cluster, "flip", "decode-0", "mixed", "--prefill-share", "0.25")
    await eventually(lambda: is_now("mixed"))
    _, told = await call(cluster, "GET", "/admin/v1/workers")
    assert next(each for each in told["workers"] if each["id"] == "decode-0")["prefill_share"] == 0.25


async def test_field_L2_a_request_is_explained_by_any_of_its_names(cluster: LocalCluster):
    """What was weighed, what it was expected to cost, and how it went."""
    async with openai_client(cluster) as client:
        answer = await client.completions.create(
            model=cluster.plan.model_dir.name,
            prompt=token_ids(3000, seed=200),
            max_tokens=3,
            extra_headers={"x-request-id": "tuesdays-one"},
        )
    for name in ("tuesdays-one", answer.id, answer.id.rpartition("-")[2]):
        status, told = await call(cluster, "GET", f"/admin/v1/explain/{name}")
        assert status == 200
        [attempt] = told["attempts"]
        assert (attempt["ending"], attempt["route"]["reason"], told["output_tokens"]) == ("done", "long_prompt", 3)
        assert {way["path"] for way in attempt["route"]["alternatives"]} == {"local"}
        terms = attempt["route"]["predicted"]
        assert sum(terms.values()) == pytest.approx(attempt["route"]["predicted_ttft_seconds"]) and terms["prefill"] > 0
        assert attempt["route"]["transfer_bytes"] > 0 and attempt["route"]["pull"] is None
        assert all(way["predicted_ttft_seconds"] > 0 for way in attempt["route"]["alternatives"])
        assert told["decided_under"]["threshold"]["threshold_tokens"] == 1000
        assert told["outcome"]["status"] == 200
    assert "remote because long_prompt" in " ".join((await prfaas(cluster, "explain", answer.id)).split())
    assert "no recent request" in await prfaas(cluster, "explain", "nobody", code=1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/v1/nothing", None, 404),
        ("POST", "/admin/v1/workers", None, 404),
        ("POST", "/admin/v1/workers/nobody/flip", {"role": "decode"}, 404),
        ("POST", "/admin/v1/workers/prefill-0/flip", {"role": "decode"}, 400),
        ("POST", "/admin/v1/workers/decode-0/flip", {"role": "chef"}, 400),
        ("POST", "/admin/v1/workers/decode-0/flip", {"role": "mixed", "prefill_share": 1.5}, 400),
        ("POST", "/admin/v1/workers/decode-0/flip", {"role": "decode", "prefill_share": 0.3}, 400),
        ("POST", "/admin/v1/workers/decode-0/flip", None, 400),
        ("POST", "/admin/v1/workers/decode-0/drain", {"forced": True}, 400),
        ("POST", "/admin/v1/workers/nobody/drain", None, 404),
        ("PUT", "/admin/v1/threshold", {}, 400),
        ("PUT", "/admin/v1/threshold", {"threshold_tokens": -1}, 400),
        ("PUT", "/admin/v1/threshold", {"threshold_tokens": 10**9}, 400),
        ("PUT", "/admin/v1/threshold", {"treshold": 5}, 400),
        ("GET", "/admin/v1/explain/nobody", None, 404),
    ],
)
async def test_what_makes_no_sense_is_refused(cluster: LocalCluster, method: str, path: str, body: object, status: int):
    """With a reason, in the shape of all other errors, and nothing is changed."""
    got, answer = await call(cluster, method, path, body)
    assert got == status and answer["error"]["message"]


async def test_without_a_key_there_is_no_admin_api(start: StartCluster, model_dir: Callable[[str], Path]):
    """Off by default."""
    plan = Plan(model_dir=model_dir("cost_model"), prefill_workers=0, pd_roles=("mixed",))
    async with start(plan) as running:
        assert running.admin == {}
