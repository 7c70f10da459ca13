"""The node's part in changing its role: what it accepts, when the work of a role it loses is over, how its engine
divides the time, and what its record in the store says.
"""

from collections.abc import Callable
from dataclasses import replace

from prfaas.cluster import Role
from prfaas.flows.convert_role import Assignment, Phase, Standing
from prfaas.membership.registration import Registration
from prfaas.node.engine_client import EngineClient
from prfaas.node.pages import WorkerPages
from prfaas.node.worker import Worker


class RoleSeat:
    """`max_batch` says how many sequences are decoded together at a share of time for prefill. A node that does not
    prefill takes `max_fallback_prefills` all the same, and `max_prefills` while it does. It begins as `start`."""

    def __init__(
        self,
        worker: Worker,
        engine: EngineClient,
        registration: Registration,
        pages: WorkerPages,
        start: Assignment,
        *,
        max_batch: Callable[[float], int],
        max_prefills: int,
        max_fallback_prefills: int,
    ) -> None:
        self.worker, self.pages, self.start = worker, pages, start
        self._engine, self._registration = engine, registration
        self._max_batch = max_batch
        self._max_prefills, self._max_fallback_prefills = max_prefills, max_fallback_prefills
        self.reconfigure(start.share)
        self.stand(Standing(start, Phase.SERVING, start.role))

    def stand(self, standing: Standing) -> None:
        """While nothing is accepted the record keeps the role that is on its way out."""
        accepts, assignment = standing.accepts, standing.assignment
        self.worker.accepts = accepts
        prefills = accepts is not None and accepts.prefills
        limits = self.worker.admission.limits
        self.worker.admission.limits = replace(
            limits, max_prefills=self._max_prefills if prefills else self._max_fallback_prefills
        )
        self._registration.update(
            accepts or assignment.role,
            prefill_share=assignment.share if accepts is Role.MIXED else None,
            epoch=assignment.epoch,
            phase=standing.phase.value,
            accepting=accepts is not None,
        )
        self.pages.stand(standing)

    async def drained(self, keeps: Role | None) -> None:
        """Until what was here of the lost role has ended. What a node takes as a fallback meanwhile is not waited
        for."""
        loses_prefill, loses_decode = not (keeps and keeps.prefills), not (keeps and keeps.decodes)
        found = self.worker.holding(prefill=loses_prefill, decode=loses_decode)
        await self.worker.ended(found, prefill=loses_prefill, decode=loses_decode)

    def reconfigure(self, share: float) -> None:
        self._engine.set_share(share, self._max_batch(share))
