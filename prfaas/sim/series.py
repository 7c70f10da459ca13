"""The cluster over time: what is in it, what waits, what the line carries, and what the loops have set."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prfaas.cluster import NodeKind, Role
from prfaas.profile import GBPS

if TYPE_CHECKING:
    from prfaas.sim.world import World

COLUMNS = (
    "at_s",
    "in_system",
    "remote_queued_tokens",
    "local_queued_tokens",
    "decoding",
    "waiting_decodes",
    "link_gbps",
    "link_capacity_gbps",
    "link_queued_bytes",
    "threshold_tokens",
    "prefill_nodes",
    "mixed_nodes",
    "decode_nodes",
    "draining_nodes",
)


class Series:
    """Samples are taken from the beginning of a run; rates are those since the last sample."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._samples: list[tuple[float, ...]] = []
        self._sent_bytes = 0.0
        world.kernel.call_later(world.scenario.sample_s, self._sample)

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        table = np.array(self._samples, dtype=np.float64).reshape(-1, len(COLUMNS))
        return {name: table[:, place] for place, name in enumerate(COLUMNS)}

    def _sample(self) -> None:
        world = self._world
        every_s = world.scenario.sample_s
        if world.kernel.now() + every_s <= world.scenario.duration_s + 1e-9:
            world.kernel.call_later(every_s, self._sample)
        workers = [worker for worker in world.cluster.workers.values() if not worker.died.is_set]
        remote = [worker for worker in workers if worker.node.kind is NodeKind.PREFILL_WORKER]
        pd = [worker for worker in workers if worker.node.kind is NodeKind.PD]
        lines = list(world.cluster.lines.values())
        sent = sum(line.sent_bytes for line in lines)
        sent_bytes, self._sent_bytes = sent - self._sent_bytes, sent
        self._samples.append(
            (
                world.kernel.now(),
                world.in_system,
                sum(worker.engine.prefill_tokens for worker in remote),
                sum(worker.engine.prefill_tokens for worker in pd),
                sum(worker.engine.active for worker in pd),
                sum(worker.engine.waiting for worker in pd),
                sent_bytes / every_s / GBPS,
                sum(line.capacity_bytes_per_s for line in lines) / GBPS,
                sum(line.waiting_bytes for line in lines),
                world.routers[0].routing.threshold_tokens,
                *(sum(worker.node.role is role for worker in pd) for role in (Role.PREFILL, Role.MIXED, Role.DECODE)),
                sum(world.reporters[worker.node.id].draining for worker in pd),
            )
        )
