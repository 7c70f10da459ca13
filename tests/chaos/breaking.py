"""Does to a cluster on this machine what a sequence says, undoes it, and starts again what ends, as a supervisor
would.
"""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import assert_never

import psutil

from services.http_client import ask, fetch
from services.local_cluster import LocalCluster
from tests.chaos.faults import Fault, Kind
from tests.chaos.guard import Guard
from tests.chaos.presence import Presence
from tests.e2e.client import total
from tests.etcd_process import EtcdProcess

#: What the pages of a process may take to answer. One that is frozen does not.
PAGE_S = 5.0
LOOK_S = 0.1
#: A process that is started again so often by itself ends as soon as it is started.
MAX_RESTARTS = 12
#: Phases of a worker that is not changing its role.
SERVING = (None, "serving")
#: What is left of the line when it is slow.
SLOW = 0.01


class Breaking:
    """`faults` counts what was done. `refused`: what an operator asked for and was not given, because it would have
    left nobody or the store was away."""

    def __init__(self, cluster: LocalCluster, key: str, etcd: EtcdProcess | None, etcd_guard: Guard) -> None:
        self.faults: Counter[Kind] = Counter()
        self.refused = 0
        self.restarts: Counter[str] = Counter()
        self._cluster, self._key, self._etcd, self._etcd_guard = cluster, key, etcd, etcd_guard
        #: Not to be started again yet, and otherwise kept from serving; of those, who was told to serve again.
        self._down: set[str] = set()
        self._held: set[str] = set()
        self._returning: set[str] = set()
        self._frozen: dict[str, Guard] = {}
        #: It is not killed while it is being started.
        self._store = asyncio.Lock()
        self._mbit = cluster.plan.wan.mbit if cluster.plan.wan is not None else 0.0
        self._roles = {f"decode-{number}": role for number, role in enumerate(cluster.plan.pd_roles)}
        self.presence = Presence([*cluster.endpoints], [*self._roles])
        self._now = asyncio.get_running_loop().time

    async def carry_out(self, faults: list[Fault]) -> None:
        """All of them, each at its time; afterwards all are undone."""
        began = self._now()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(self._one(fault, began), name=str(fault))

    async def _one(self, fault: Fault, began: float) -> None:
        await asyncio.sleep(began + fault.at_s - self._now())
        if not await self._inflict(fault):
            self.refused += 1
            self._returning |= self._held & {fault.target}
            return
        self.faults[fault.kind] += 1
        try:
            await asyncio.sleep(began + fault.at_s + fault.lasts_s - self._now())
        finally:
            await self._undo(fault)

    async def _inflict(self, fault: Fault) -> bool:
        match fault.kind:
            case Kind.KILL:
                self._down.add(fault.target)
                self.presence.gone(fault.target)
                await self._kill(fault.target)
            case Kind.FREEZE:
                if (process := self._cluster.processes[fault.target]).returncode is not None:
                    return False  # it is being started again
                self._hold(fault.target)
                self._frozen[fault.target] = guard = Guard(signal.SIGCONT)
                guard.watch(process.pid)
                process.send_signal(signal.SIGSTOP)
            case Kind.CUT:
                await self._line(f"cut?seconds={fault.lasts_s + PAGE_S:g}")
            case Kind.SLOW:
                await self._line(f"rate?mbit={self._mbit * SLOW:g}")
            case Kind.STORE:
                async with self._store:
                    self.presence.store_gone()
                    if self._etcd is not None:
                        await asyncio.to_thread(self._etcd.kill)
                    else:
                        assert self._cluster.store is not None
                        await self._cluster.store.stop()
            case Kind.DRAIN:
                self._hold(fault.target)
                self._returning.discard(fault.target)
                return await self._admin("POST", f"workers/{fault.target}/drain")
            case Kind.FLIP:
                self._hold(fault.target)
                self._returning.discard(fault.target)
                return await self._admin("POST", f"workers/{fault.target}/flip", {"role": fault.role})
            case _:
                assert_never(fault.kind)
        return True

    async def _undo(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                self._down.discard(fault.target)
            case Kind.FREEZE:
                await asyncio.to_thread(self._frozen.pop(fault.target).act)
                if fault.target not in self._returning:
                    self._held.discard(fault.target)
            case Kind.CUT:
                await self._line("mend")
            case Kind.SLOW:
                await self._line(f"rate?mbit={self._mbit:g}")
            case Kind.STORE:
                async with self._store:
                    if self._etcd is not None:
                        await asyncio.to_thread(self._etcd.start_again)
                        self._etcd_guard.watch(self._etcd.pid)
                    else:
                        assert self._cluster.store is not None
                        await self._cluster.store.start()
                    self.presence.store_back(self._now())
            # Where nobody can be asked, `settled` does it later.
            case Kind.DRAIN:
                if await self._admin("DELETE", f"workers/{fault.target}/drain"):
                    self._returning.add(fault.target)
            case Kind.FLIP:
                if await self._admin("POST", f"workers/{fault.target}/flip", {"role": self._roles[fault.target]}):
                    self._returning.add(fault.target)
            case _:
                assert_never(fault.kind)

    async def settled(self) -> bool:
        """every process is ready, no worker drains, and each PD node serves in the role that it began with"""
        if self._down or not await self._all_ready():
            return False
        workers = await self._workers()
        if workers is None or len(workers) != len(self._roles) + self._cluster.plan.prefill_workers:
            return False
        away = [name for name, worker in workers.items() if not self._serves(name, worker)]
        for name in away:
            if workers[name]["draining"]:
                await self._admin("DELETE", f"workers/{name}/drain")
            if workers[name]["phase"] in SERVING and name in self._roles:
                await self._admin("POST", f"workers/{name}/flip", {"role": self._roles[name]})
        if not away:
            self._held.clear()
            self._returning.clear()
        return not away

    def _serves(self, name: str, worker: dict[str, object]) -> bool:
        """In the role that it began with, as a router sees it."""
        role = self._roles.get(name, worker["role"])
        return not worker["draining"] and worker["role"] == role and worker["phase"] in SERVING

    async def supervise(self) -> None:
        """Until cancelled: what has ended is started again, unless it is to be down."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_again())
            group.create_task(self._see_who_is_back())

    async def _start_again(self) -> None:
        while True:
            for name, process in [*self._cluster.processes.items()]:
                if process.returncode is None or name in self._down:
                    continue
                self.presence.gone(name)
                self.restarts[name] += 1
                assert self.restarts[name] <= MAX_RESTARTS, f"{name} ends as soon as it is started"
                await self._cluster.start_again(name)
            await asyncio.sleep(LOOK_S)

    async def _see_who_is_back(self) -> None:
        while True:
            await self._see_who_serves_again()
            for name in self.presence.away():
                ready = name not in self._down | self._held and await self._ready(name)
                if ready and name not in self._down | self._held:
                    self.presence.back(name, self._now())
            self.presence.look(self._now())
            await asyncio.sleep(LOOK_S)

    async def _see_who_serves_again(self) -> None:
        """A flip takes a while after it was asked for, and longer while the store is away."""
        waiting = self._returning - self._frozen.keys()
        workers = (await self._workers() or {}) if waiting else {}
        back = {name for name in waiting & self._returning if name in workers and self._serves(name, workers[name])}
        self._returning -= back
        self._held -= back - self._frozen.keys()

    async def _kill(self, name: str) -> None:
        """With its children, which hold its ports until they are gone."""
        process = self._cluster.processes[name]
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.wait()
            await asyncio.to_thread(psutil.wait_procs, children, PAGE_S)

    def _hold(self, name: str) -> None:
        self._held.add(name)
        self.presence.gone(name)

    async def _line(self, command: str) -> None:
        url = self._cluster.metrics["wan-relay"].replace("metrics", command)
        status, body = await asyncio.to_thread(ask, "POST", url)
        assert status == 200, body

    async def _admin(self, method: str, path: str, body: object = None) -> bool:
        """By any router that answers; whether it was done."""
        return any([status == 200 async for status, _ in self._asked(method, path, body)])

    async def _workers(self) -> dict[str, dict[str, object]] | None:
        async for status, body in self._asked("GET", "workers"):
            if status == 200:
                return {worker["id"]: worker for worker in json.loads(body)["workers"]}
        return None

    async def _asked(self, method: str, path: str, body: object = None) -> AsyncIterator[tuple[int, str]]:
        """What each router says, until one has done it."""
        for router in self._ups():
            url = f"{self._cluster.admin[router]}/admin/v1/{path}"
            try:
                async with asyncio.timeout(PAGE_S):
                    answer = await asyncio.to_thread(ask, method, url, key=self._key, body=body)
            except (OSError, ValueError):
                continue
            yield answer
            if answer[0] == 200:
                return

    def _ups(self) -> Iterator[str]:
        return (name for name in self._cluster.admin if name not in self._down)

    async def _all_ready(self) -> bool:
        names = [name for name in self._cluster.metrics if name != "wan-relay"]
        return all(await asyncio.gather(*(self._ready(name) for name in names)))

    async def _ready(self, name: str) -> bool:
        """It answers; a router, that it sees all workers."""
        page = self._cluster.metrics[name]
        try:
            async with asyncio.timeout(PAGE_S):
                status, _ = await asyncio.to_thread(fetch, page.replace("/metrics", "/ready"))
                if status != 200 or name not in self._cluster.endpoints:
                    return status == 200
                _, body = await asyncio.to_thread(fetch, page)
        except OSError:
            return False
        samples = dict(line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#"))
        seen = total({series: float(value) for series, value in samples.items()}, "prfaas_router_live_nodes")
        return seen == len(self._roles) + self._cluster.plan.prefill_workers
