"""KV of one prefill on its way to the reservation it was made for.

It is sent while it is computed; the state of fixed size comes into being only at the end, so that what is exposed is
at least the state's time on the line. Inside a region each pair of nodes has the fabric to itself, between regions all
share the line.
"""

from collections.abc import Callable

from prfaas.cluster import NodeId
from prfaas.sim.kernel import Kernel, Timer
from prfaas.sim.link import Line
from prfaas.sim.transfer import Transfer


class FabricTransfer:
    """A `link.Transfer` between two nodes of one region: as fast as the fabric, whatever others do."""

    def __init__(self, kernel: Kernel, bytes_per_s: float, done: Callable[[], None]) -> None:
        self._kernel, self._bytes_per_s, self._done = kernel, bytes_per_s, done
        self._fed_bytes = self._feed_bytes_per_s = 0.0
        self._settled_s = kernel.now()
        self._timer: Timer | None = None

    def add(self, nbytes: float) -> None:
        self._fed_bytes += nbytes

    def feed(self, bytes_per_s: float) -> None:
        now = self._kernel.now()
        self._fed_bytes += (now - self._settled_s) * self._feed_bytes_per_s
        self._settled_s, self._feed_bytes_per_s = now, bytes_per_s

    def close(self, total_bytes: float) -> None:
        self.feed(0.0)
        rest = max(0.0, total_bytes - self._fed_bytes)
        self._timer = self._kernel.call_later(rest / self._bytes_per_s, self._done)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


AnyTransfer = Transfer | FabricTransfer


class Push:
    """`open` when the prefill begins; then `feed` and `close` as it computes; `end` at any time.

    `arrived` is called when the last byte has, `lost` when the line gave up.
    """

    def __init__(
        self,
        kernel: Kernel,
        source: NodeId,
        route: Line | float,
        hop_s: float,
        arrived: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._kernel, self._source, self._route, self._hop_s = kernel, source, route, hop_s
        self._arrived, self._lost = arrived, lost
        self._transfer: AnyTransfer | None = None
        self._bytes_per_token = 0.0
        self._flight: Timer | None = None
        self.total_bytes = 0.0
        self.computed_s: float | None = None

    def open(self, ready_bytes: float, bytes_per_token: float, total_bytes: float) -> None:
        """`ready_bytes` are there already, `bytes_per_token` come with each token computed."""
        self._bytes_per_token, self.total_bytes = bytes_per_token, total_bytes
        if isinstance(self._route, Line):
            self._transfer = self._route.open(self._source, self._left, self._lost)
        else:
            self._transfer = FabricTransfer(self._kernel, self._route, self._left)
        if ready_bytes > 0:
            self._transfer.add(ready_bytes)

    def feed(self, tokens_per_s: float) -> None:
        if self._transfer is not None:
            self._transfer.feed(tokens_per_s * self._bytes_per_token)

    def close(self) -> None:
        assert self._transfer is not None
        self.computed_s = self._kernel.now()
        self._transfer.close(self.total_bytes)

    def end(self) -> None:
        """Idempotent."""
        if self._transfer is not None:
            self._transfer.cancel()
        if self._flight is not None:
            self._flight.cancel()

    def _left(self) -> None:
        self._flight = self._kernel.call_later(self._hop_s, self._arrived)
