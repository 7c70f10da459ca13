"""The worker's half of the connector: copies between the server's cache and the windows of the pool.

It copies on the thread that computes, before and within a step, so that the blocks are the request's for as long as
the copy takes. A second thread takes orders; a Revoke is answered between two copies. What goes wrong with one attempt
is the end of its grant, never of the server.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch

from prfaas.engine.vllm.books import Load, Orders, Save
from prfaas.engine.vllm.bridge import Begun, Grant, Granted, Hello, Loaded, Order, Revoke, Revoked, Saved, Wrote
from prfaas.engine.vllm.line import Line, Memory
from prfaas.engine.vllm.rows import Rows
from prfaas.kvcache.layout import Extent, Part, Window

# Below vLLM's own, so that its handlers write it.
logger = logging.getLogger("vllm.prfaas")


class Copies:
    """`states`: of each recurrent layer, its pages [blocks, bytes]. `gone` is called when the other end closes; without
    it others may come."""

    def __init__(
        self,
        bridge: str,
        hello: Hello,
        rows: Mapping[int, Rows],
        states: Mapping[int, torch.Tensor],
        gone: Callable[[], None] | None,
    ) -> None:
        self._geometry, self._layout = hello.geometry, hello.geometry.layout
        self._rows, self._states, self._gone = rows, states, gone
        self._grants: dict[str, Grant] = {}
        # Held while the pool is touched.
        self._lock = threading.Lock()
        self._memory_of_worker: Memory | None = None
        self._line = Line(bridge, hello, self._came, self._take, self._left, stays=gone is None)
        self._tell = self._line.tell

    def begin(self, orders: Orders) -> None:
        """Before the step's forward."""
        now = time.monotonic()
        for begin in orders.begins:
            self._tell(Begun(begin.attempt, begin.computed, now))

    def load(self, orders: Orders) -> tuple[set[str], set[str]]:
        """Within the step, before or after its forward: what is loaded is in no forward before the next step's. The
        requests whose load has ended, and of these the ones where it failed."""
        failed = set()
        for load in orders.loads:
            ok = self._load(load)
            self._tell(Loaded(load.attempt, ok))
            if not ok:
                failed.add(load.request)
        return {load.request for load in orders.loads}, failed

    def layer_done(self, name: str, orders: Orders) -> None:
        """Within the forward: this attention layer holds the step's tokens."""
        for save in orders.saves:
            self._write_out(save, lambda index: self._geometry.layers[index].name == name)

    def end(self, orders: Orders) -> None:
        """After the forward."""
        for save in orders.saves:
            if save.last:
                self._write_out(save, lambda index: not self._geometry.layers[index].grows)
                with self._lock:
                    granted = save.attempt in self._grants
                if granted:
                    self._tell(Saved(save.attempt, time.monotonic()))

    def _load(self, load: Load) -> bool:
        with self._lock:
            grant = self._grants.get(load.attempt)
            if grant is None or grant.held_tokens != load.stop:
                return False
            ends = tuple(sorted({min(window.stop, load.stop) for window in grant.held} - {0}))
            states = (load.stop,) if self._layout.state_bytes else ()
            try:
                for part in self._layout.extent_parts(Extent(0, load.stop, states), ends, grant.held):
                    self._read_in(part, load)
            except Exception:
                logger.exception("loading %s failed: the server computes it", load.attempt)
                return False
            return True

    def _read_in(self, part: Part, load: Load) -> None:
        layer = self._geometry.layers[part.layer]
        blocks = load.blocks[layer.group]
        if not layer.grows:
            self._states[part.layer][blocks[-1]] = self._memory(part)
        elif part.stop > load.start:
            rows = self._memory(part).view(getattr(torch, layer.tensor.dtype)).view(-1, *layer.tensor.shape)
            start = max(part.start, load.start)
            self._rows[part.layer].write(blocks, start, part.stop, rows[start - part.start :])

    def _write_out(self, save: Save, wanted: Callable[[int], bool]) -> None:
        with self._lock:
            grant = self._grants.get(save.attempt)
            if grant is None or grant.out is None:
                return
            try:
                for part in self._parts(grant.out, save.start, save.stop):
                    if wanted(part.layer):
                        self._write(part, save)
                        self._announce(part, save, grant.ends)
            except Exception:
                logger.exception("saving %s failed", save.attempt)
                del self._grants[save.attempt]

    def _announce(self, part: Part, save: Save, ends: tuple[int, ...]) -> None:
        """Rows at each end that the step has passed, a state where it is."""
        grows = self._geometry.layers[part.layer].grows
        for end in ends:
            if save.start < end <= save.stop and (grows or end == part.stop):
                self._tell(Wrote(save.attempt, part.layer, end))

    def _write(self, part: Part, save: Save) -> None:
        layer = self._geometry.layers[part.layer]
        blocks, memory = save.blocks[layer.group], self._memory(part)
        if layer.grows:
            rows = memory.view(getattr(torch, layer.tensor.dtype)).view(-1, *layer.tensor.shape)
            self._rows[part.layer].read(blocks, part.start, part.stop, rows)
        else:
            memory.copy_(self._states[part.layer][blocks[-1]])

    def _parts(self, out: Window, start: int, stop: int) -> tuple[Part, ...]:
        """What of the window a step fills: nothing before its first row, and the states where it ends."""
        first, stop = max(start, out.first), min(stop, out.stop)
        if first > stop:
            return ()
        states = (stop,) if out.state and stop == out.stop and self._layout.state_bytes else ()
        return self._layout.extent_parts(Extent(first, stop, states), (stop,) if first < stop else (), (out,))

    def _memory(self, part: Part) -> torch.Tensor:
        assert self._memory_of_worker is not None, "grants end before the memory goes"
        return self._memory_of_worker.at(part.offset, part.nbytes)

    def _came(self, memory: Memory) -> None:
        with self._lock:
            self._memory_of_worker = memory

    def _left(self) -> None:
        with self._lock:
            self._grants.clear()
            self._memory_of_worker = None
        if self._gone is not None:
            self._gone()

    def _take(self, order: Order) -> None:
        match order:
            case Grant():
                with self._lock:
                    self._grants[order.attempt] = order
                self._tell(Granted(order.attempt))
            case Revoke():
                with self._lock:
                    self._grants.pop(order.attempt, None)
                self._tell(Revoked(order.attempt))
