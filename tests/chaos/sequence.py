"""One sequence on a cluster: load, faults, healing, and what must hold of all three."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from services.local_cluster import LocalCluster
from tests.chaos.asked import Asked
from tests.chaos.breaking import Breaking
from tests.chaos.faults import Fault, Kind, draw
from tests.chaos.guard import Guard
from tests.chaos.load import GONE, RIGHT_KINDS, Error, Load, Tally, kinds, needless
from tests.chaos.rest import Usage, all_given_back, come_true, grown, held, leases, usage
from tests.e2e.client import LIVENESS_S
from tests.etcd_process import EtcdProcess

#: After the last fault everything is there again, and all answers are right, within this.
WHOLE_AGAIN_S = 45.0
#: Right answers in a row that show it.
ENOUGH = 6
#: All leases of the dead are gone after this.
LEASES_S = 60.0
#: What no fault explains, of first tries and of second ones, in one sequence: faults meet in ways that are not told
#: apart here. `sequences.py` bounds what comes of many sequences.
MOST_NEEDLESS, MOST_NEEDLESS_AGAIN = 6, 2


@dataclass(frozen=True, slots=True)
class World:
    """What sequences share."""

    cluster: LocalCluster
    asked: list[Asked]
    etcd: EtcdProcess | None
    etcd_guard: Guard
    admin_key: str
    #: Requests a second: what the cluster has room for when only half of it is there.
    per_s: float
    before: dict[str, Usage]
    leases: int


@dataclass
class Outcome:
    """`whole_again_s`: from the end of the last fault until every process was ready and in its role; `last_error_s`:
    until the last error, below 0 when there was none since."""

    seed: int
    seconds: float
    faults: list[Fault]
    done: Counter[Kind] = field(default_factory=Counter)
    refused: int = 0
    restarts: int = 0
    tally: Tally = field(default_factory=Tally)
    whole_again_s: float = -1.0
    last_error_s: float = 0.0
    usage: dict[str, Usage] = field(default_factory=dict)
    leases: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def needless(self) -> int:
        """Errors of first tries that no fault explains."""
        return len(_needless(self.tally))

    def told(self) -> str:
        """For who has to find out why."""
        last = [*self.tally.errors[-8:], *self.tally.failed[-8:]]
        errors = [f"{each.kind} after {each.at_s:.2f} s ({each.why}): {each.what}" for each in last]
        return "\n".join(
            [
                f"seed {self.seed}, {self.seconds:g} s: {len(self.broken)} things that should not be",
                *self.broken,
                "faults:",
                *map(str, self.faults),
                *(["the last errors:", *errors] if errors else []),
            ]
        )

    def figures(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "faults": {kind.value: count for kind, count in sorted(self.done.items(), key=lambda each: each[0].value)},
            "refused_by_the_cluster": self.refused,
            "restarts": self.restarts,
            "requests": tally.sent,
            "right": tally.right,
            "left_by_their_clients": tally.left,
            "held_back": tally.held_back,
            "right_when_asked_again": tally.right_again,
            "migrations": tally.moves,
            "prefilled_remotely": tally.remote,
            "tokens_compared": tally.tokens,
            "wrong": len(tally.wrong),
            "hung": len(tally.hung),
            "errors": dict(sorted(kinds(tally.errors).items())),
            "errors_that_no_fault_explains": self.needless,
            "failed_again": dict(sorted(kinds(tally.failed).items())),
            "failed_again_that_no_fault_explains": len(needless(tally.failed)),
            "whole_again_seconds": round(self.whole_again_s, 2),
            "last_error_seconds": round(self.last_error_s, 2),
            "fds": sum(each.fds for each in self.usage.values()),
            "connections": sum(each.connections for each in self.usage.values()),
            "rss_mib": sum(each.rss_bytes for each in self.usage.values()) >> 20,
            "leases": self.leases,
        }


async def run(world: World, seed: int, seconds: float, spared: tuple[str, ...] = ()) -> Outcome:
    """What came of it; `broken` is empty if all is well."""
    cluster, now = world.cluster, asyncio.get_running_loop().time
    faults = draw(seed, seconds, sorted(cluster.processes), spared)
    outcome = Outcome(seed, seconds, faults)
    breaking = Breaking(cluster, world.admin_key, world.etcd, world.etcd_guard)
    load = Load(cluster, world.asked, random.Random(f"load {seed}"), breaking.presence)
    outcome.tally, outcome.done = load.tally, breaking.faults
    tally = load.tally
    supervising = asyncio.create_task(breaking.supervise(), name="supervisor")
    asking = asyncio.create_task(load.run(world.per_s), name="load")
    began = now()
    try:
        await _hold(outcome, breaking.carry_out(faults))
        healed = now()
        await _hold(outcome, come_true(breaking.settled, WHOLE_AGAIN_S))
        outcome.whole_again_s = now() - healed
        tally.in_a_row = 0

        async def answers_are_right() -> bool:
            """requests are answered again, one after the other"""
            return tally.in_a_row >= ENOUGH

        await _hold(outcome, come_true(answers_are_right, WHOLE_AGAIN_S))
        outcome.last_error_s = max((each.at_s for each in tally.errors), default=began) - healed
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await _hold(outcome, supervising)
    for errors in (tally.errors, tally.failed):
        errors[:] = [replace(each, at_s=each.at_s - began) for each in errors]
    outcome.refused, outcome.restarts = breaking.refused, breaking.restarts.total()
    await _look(world, outcome)
    return outcome


async def _look(world: World, outcome: Outcome) -> None:
    tally, broken = outcome.tally, outcome.broken
    broken += [f"wrong: {each}" for each in tally.wrong[:3]] + [f"hung: {each}" for each in tally.hung[:3]]
    if odd := [each for each in (*tally.errors, *tally.failed) if each.kind not in RIGHT_KINDS]:
        broken += [f"an error of the wrong kind: {each.kind}: {each.what}" for each in odd]
    if len(none := _needless(tally)) > MOST_NEEDLESS or len(needless(tally.failed)) > MOST_NEEDLESS_AGAIN:
        broken += [f"no fault explains: {each}" for each in (*none, *needless(tally.failed))]

    async def given_back() -> bool:
        """every counter of what is held is back to base line, on all routers, workers and pools"""
        return await all_given_back(world.cluster)

    if not await _hold(outcome, come_true(given_back, LIVENESS_S)):
        broken.append(f"held: {await held(world.cluster)}")

    async def few() -> bool:
        """there are no more file descriptors and connections than before"""
        return not grown(world.before, usage(world.cluster))

    if not await _hold(outcome, come_true(few, LIVENESS_S)):
        broken += grown(world.before, usage(world.cluster))
    if world.etcd is not None:
        outcome.leases = await asyncio.to_thread(leases, world.etcd)
    outcome.usage = usage(world.cluster)


async def leases_expire(world: World) -> None:
    """Those of who was killed: the store has no more than before. It may take longer than another sequence, so that
    it is looked at after the last one."""
    if (etcd := world.etcd) is None:
        return

    async def expired() -> bool:
        """the store has no more leases than before"""
        return await asyncio.to_thread(leases, etcd) <= world.leases

    await come_true(expired, LEASES_S)


def _needless(tally: Tally) -> list[Error]:
    """A connection to a router that was killed says why by itself."""
    return [each for each in needless(tally.errors) if each.kind != GONE]


async def _hold(outcome: Outcome, condition: Awaitable[None]) -> bool:
    """Wait for it; what does not come true is noted, and the rest is looked at all the same."""
    try:
        await condition
    except Exception as error:
        outcome.broken.append(str(error) if isinstance(error, AssertionError) else repr(error))
        return False
    return True
