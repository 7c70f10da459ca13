"""A quarter of an hour of faults, one round after the other: what the cluster has at rest does not grow."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.rest import Usage
from tests.chaos.sequence import World, leases_expire, run

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 900.0)
SEED = int(os.environ.get("CHAOS_SEEDS", "").split()[0] if os.environ.get("CHAOS_SEEDS") else 1000)
ROUND_S = 60.0
FAMILY = "kimi_linear"
#: Never killed, so that they are as old as the soak at its end; everything else comes to them.
WITNESSES = ("router", "prefill-0", "decode-0", "pool-a-0")
#: What a witness may have more in the last third of the rounds than in the second, in the median.
MORE_BYTES, MORE_FDS, MORE_CONNECTIONS = 32 << 20, 8, 8

pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(4 * SECONDS + 600)]


async def test_churn_leaves_memory_and_connections_flat(world: World, note: Callable[[dict[str, Any]], None]) -> None:
    """Rounds of a minute, each of them a sequence that has to hold by itself."""
    rounds: list[dict[str, Usage]] = []
    until, pids = time.monotonic() + SECONDS, _pids(world)
    while time.monotonic() < until:
        outcome = await run(world, SEED + len(rounds), ROUND_S, WITNESSES)
        note(outcome.figures())
        assert not outcome.broken, outcome.told()
        rounds.append(outcome.usage)
    await leases_expire(world)
    third = len(rounds) // 3
    assert third, "too short to say"
    for name, pid in pids.items():
        if world.cluster.processes[name].pid != pid:
            continue  # it has ended itself because it had stood still, and has begun anew
        early, late = ([each[name] for each in part] for part in (rounds[third : 2 * third], rounds[-third:]))
        assert _median(late, "rss_bytes") <= _median(early, "rss_bytes") + MORE_BYTES, name
        assert _median(late, "fds") <= _median(early, "fds") + MORE_FDS, name
        assert _median(late, "connections") <= _median(early, "connections") + MORE_CONNECTIONS, name


def _pids(world: World) -> dict[str, int]:
    return {name: world.cluster.processes[name].pid for name in (*WITNESSES, "wan-relay")}


def _median(usages: list[Usage], what: str) -> float:
    return statistics.median(getattr(each, what) for each in usages)
