"""From the leader's view to the packets: a real etcd between the pacing loop and the pump that obeys."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from prfaas.cluster import Budget, ClusterView, NodeId
from prfaas.flows.pacing import pacing_loop
from prfaas.live.clock import AsyncioClock
from prfaas.membership.budgets import BudgetWriter
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.follow_budget import BudgetFollower
from prfaas.scheduling.budget import Budgeter, BudgetParams
from prfaas.transfer.pump import messages as m
from tests.etcd_process import ETCD, start_etcd
from tests.integration.kv_pumps import LAYOUT, LIVENESS_S, Pump, parts_of, pumps, start_transfer
from tests.unit.scheduling.steering_scenes import FAR, NEAR, sending, view_of

TOKENS = 4000
SIZE = LAYOUT.size_bytes(TOKENS)
LINE = 40e6
PERIOD_S, REPEAT_S, LAPSE_S = 0.1, 0.3, 2.0


class Leader(AsyncioClock):
    """`PacingPorts` of a router that sees two nodes with the same backlog."""

    def __init__(self, writer: BudgetWriter) -> None:
        super().__init__()
        self._writer, self.leading = writer, True

    def view(self) -> ClusterView:
        return view_of(*(sending(name, sent=0.0, queued=10**9) for name in ("p0", "p1")))

    def leads(self) -> bool:
        return self.leading

    async def allow(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        for budget in budgets:
            await self._writer.publish(budget)
        return budgets


def crossing_s(source: Pump, target: Pump) -> float:
    attempt, _, _ = start_transfer(source, target, TOKENS, region=NEAR)
    began = time.monotonic()
    source.tell(m.PartsReady(attempt, parts_of(TOKENS)))
    assert isinstance(source.outcome(attempt), m.Sent)
    took_s = time.monotonic() - began
    for pump in (source, target):
        pump.tell(m.Release(attempt))
    return took_s


@pytest.mark.skipif(ETCD is None, reason="no etcd on this machine: install etcd-server")
async def test_a_pump_sends_what_the_leader_allows_it_until_the_leader_is_gone(tmp_path: Path):
    """Half of 95 % of the line while two nodes wait for it; without a leader that repeats it, as fast as it can."""
    etcd = start_etcd(tmp_path / "etcd")
    store = EtcdStore([etcd.endpoint])
    told: asyncio.Queue[float | None] = asyncio.Queue()
    with pumps({}, {}) as (source, target):

        def allow(region: str, bytes_per_s: float | None) -> None:
            source.tell(m.Allow(region, bytes_per_s))
            told.put_nowait(bytes_per_s)

        leader = Leader(BudgetWriter(store, "c", "r0"))
        budgeter = Budgeter({(FAR, NEAR): LINE}, BudgetParams(repeat_s=REPEAT_S))
        tasks = [
            asyncio.create_task(pacing_loop(leader, budgeter, PERIOD_S)),
            asyncio.create_task(BudgetFollower(store, "c", FAR, NodeId("p0"), allow, lapse_s=LAPSE_S).run()),
        ]
        try:
            async with asyncio.timeout(LIVENESS_S):
                allowed = await told.get()
                assert allowed == LINE * 0.95 / 2
                paced_s = await asyncio.to_thread(crossing_s, source, target)
                assert paced_s > 0.7 * SIZE / allowed
                leader.leading = False
                assert await told.get() is None
                assert await asyncio.to_thread(crossing_s, source, target) < paced_s / 2
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
            await store.close()
            etcd.stop()
