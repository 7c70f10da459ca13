"""A new version of the model takes the place of the old one, service by service, with requests coming in.

The versions have the same name and other weights: KV of the one means nothing to the other. The model folder is a link
that is set to the new version, as a deployment would; whoever starts after that is the new one.
"""

import asyncio
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.cost_model import write_config
from services.http_client import fetch
from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import Completed, at_rest, complete, eventually, metrics, total
from tests.e2e.conftest import StartCluster
from tests.e2e.load import Kind, Load, loaded
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIX = (Kind(200, 30), Kind(1200, 6), Kind(400, 60), Kind(2500, 4))
#: Long enough for all that is under way to end by itself.
DRAIN_S = 30.0
LIMIT_S = 60.0


class Upgrade:
    """Of a running cluster. `new` are the processes that have been started again."""

    def __init__(self, cluster: LocalCluster, link: Path) -> None:
        self.cluster, self._link = cluster, link
        self.new: set[str] = set()

    def begin(self, version: Path) -> None:
        self._link.unlink()
        self._link.symlink_to(version)

    async def restart(self, name: str) -> None:
        """SIGTERM, its orderly end, and the new version in its place."""
        process, metrics_at = self.cluster.processes[name], self.cluster.metrics.pop(name)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0, f"{name} did not end in order"
        await self.cluster.start_again(name)

        async def ready() -> bool:
            """the new one is ready"""
            try:
                status, _ = await asyncio.to_thread(fetch, metrics_at.replace("/metrics", "/ready"))
            except OSError:
                return False
            return status == 200

        await eventually(ready)
        self.cluster.metrics[name] = metrics_at
        self.new.add(name)


def pairs(load: Load) -> set[tuple[str, str]]:
    return {(one.receipt["prefill"], one.receipt["decode"]) for one in load.done.values()}


def mended(done: Completed) -> bool:
    """Whether some attempt met a node of the other version."""
    return any("namespace" in (attempt.get("detail") or "") for attempt in done.receipt["attempts"])


async def more(load: Load, count: int) -> None:
    """So many requests that are sent from now on have been answered."""
    wanted = max(load.sent, default=-1) + count

    async def answered() -> bool:
        """requests go on being answered"""
        return wanted in load.done

    await eventually(answered)


def versions_seen(load: Load, old: Alone) -> set[bool]:
    """Of the answers so far: whether they are the old version's."""
    kinds = ((number, load.mix[number % len(load.mix)]) for number in load.done)
    return {
        load.done[number].token_ids
        == old.answer(token_ids(kind.prompt_tokens, seed=kind.prompt_tokens), kind.max_tokens)
        for number, kind in kinds
    }


async def both_serve(load: Load, old: Alone) -> None:
    async def both() -> bool:
        """both versions have answered"""
        return versions_seen(load, old) == {True, False}

    await eventually(both)


@dataclass(frozen=True)
class Versions:
    """`link` leads to the old one."""

    old: Path
    new: Path
    link: Path

    @classmethod
    def made(cls, directory: Path) -> "Versions":
        versions = cls(directory / "old", directory / "new", directory / "current")
        for version, layers in ((versions.old, 8), (versions.new, 12)):
            write_config(version / "tiny", layers=layers)
        versions.link.symlink_to(versions.old)
        return versions

    def references(self) -> tuple[Alone, Alone]:
        old, new = Alone(self.old / "tiny"), Alone(self.new / "tiny")
        assert old.engine.info.namespace != new.engine.info.namespace
        assert old.answer(token_ids(200), 8) != new.answer(token_ids(200), 8)
        return old, new

    def plan(self, **options: Any) -> Plan:
        drain = ("--drain-timeout-s", str(DRAIN_S))
        extra = {"decode-worker": drain, "prefill-worker": drain}
        return Plan(model_dir=self.link / "tiny", threshold_tokens=1000, rebalance=False, extra=extra, **options)


async def test_field_G3_two_versions_side_by_side_are_never_paired(start_embedded: StartCluster, tmp_path: Path):
    """Half of the cluster is new: both halves serve, and where there is no prefill worker of its version a node does
    without. No request meets a node of the other version, or is cut off by the change."""
    versions = Versions.made(tmp_path)
    old, new = versions.references()
    async with start_embedded(versions.plan()) as cluster:
        upgrade = Upgrade(cluster, versions.link)
        async with loaded(cluster, old, MIX, 6, others=(new,)) as load:
            await more(load, len(MIX))
            assert versions_seen(load, old) == {True}
            upgrade.begin(versions.new)
            for name in ("prefill-0", "decode-0"):
                await upgrade.restart(name)
                await more(load, len(MIX))
            await both_serve(load, old)
            assert not any(map(mended, load.done.values()))
        assert total(await metrics(cluster, "router"), "prfaas_router_migrations_total") == 0
        await eventually(lambda: at_rest(cluster))


@pytest.mark.slow
async def test_field_G3_a_rolling_upgrade_loses_no_request(start_embedded: StartCluster, tmp_path: Path):
    """All services, one after the other, routers and shards of the cache among them; in the end all is new."""
    versions = Versions.made(tmp_path)
    old, new = versions.references()
    async with start_embedded(versions.plan(prefill_workers=2, routers=2, pools=1)) as cluster:
        upgrade = Upgrade(cluster, versions.link)
        through = replace(cluster, endpoint=cluster.endpoints["router-1"])
        async with loaded(through, old, MIX, 5, others=(new,)) as load:
            await more(load, len(MIX))
            upgrade.begin(versions.new)
            for name in ("router", "prefill-0", "decode-0", "decode-1", "prefill-1", "pool-a-0", "pool-b-0"):
                await upgrade.restart(name)
                await more(load, len(MIX))
            assert versions_seen(load, old) == {True, False}
            assert not any(map(mended, load.done.values()))
            assert pairs(load) >= {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}
        assert total(await metrics(cluster, "router-1"), "prfaas_router_migrations_total") == 0
        # It has served all the while; now it goes, too, and the clients come by the other.
        async with loaded(cluster, new, MIX, 5) as load:
            await upgrade.restart("router-1")
            await more(load, len(MIX))
        done = await complete(cluster, token_ids(2500, seed=1), 8)
        assert (done.token_ids, done.receipt["path"]) == (new.answer(token_ids(2500, seed=1), 8), "remote")
        assert upgrade.new == cluster.processes.keys()
        await eventually(lambda: at_rest(cluster))
