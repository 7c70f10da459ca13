"""What one command to a simulated worker is answered with: in order, until the connection is lost.

A connection falls silent once it has lost a message; the death of the worker shows at once.
"""

from collections import deque
from typing import Any

from prfaas.cluster import NodeId
from prfaas.errors import PeerUnavailable, PrfaasError
from prfaas.sim.task import Future


class Answers:
    def __init__(self, node: NodeId) -> None:
        self.silent = False
        self._node = node
        self._lost = False
        self._arrived: deque[Any] = deque()
        self._more: Future[None] | None = None

    def put(self, answer: Any) -> None:
        if not self._lost:
            self._arrived.append(answer)
            self._wake()

    def lose(self) -> None:
        """Nothing more will come."""
        self._lost = True
        self._wake()

    async def next(self) -> Any:
        """The next answer; an error is raised. PeerUnavailable when the worker dies first."""
        if not self._arrived and not self._lost:
            self._more = Future("answer")
            await self._more
        if not self._arrived:
            raise PeerUnavailable(self._node, "connection lost")
        answer = self._arrived.popleft()
        if isinstance(answer, PrfaasError):
            raise answer
        return answer

    def _wake(self) -> None:
        if self._more is not None:
            self._more.set_result(None)
