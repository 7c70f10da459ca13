"""Exports of an engine process: what an attempt has computed is written into windows, one window per turn, while the
attempt goes on. Rows never change once they are computed, and a snapshot never does."""

from collections import deque
from collections.abc import Callable

import structlog

from prfaas.engine.messages import Export, Exported, ExportFailed
from prfaas.kvcache.layout import Extent, Window
from prfaas.node.engine_refusal import wrong_windows
from prfaas.node.engine_sequence import Sequence
from prfaas.node.engine_workbench import Workbench

log = structlog.get_logger()


class ExportQueue:
    """First come, first served, one at a time per attempt. `find` gives the sequence of an attempt, wherever it is."""

    def __init__(self, bench: Workbench, find: Callable[[str], Sequence | None]) -> None:
        self._bench, self._find = bench, find
        self._queue: dict[str, deque[Window]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def attempts(self) -> list[str]:
        return list(self._queue)

    def add(self, command: Export) -> None:
        if command.attempt in self._queue:
            # Only one answer can be told from none: the first export ends with the second.
            self._fail(command.attempt, "an export of the attempt is under way")
        elif self._find(command.attempt) is None:
            self._fail(command.attempt, "no sequence of the attempt is here")
        elif wrong := wrong_windows(command.windows, self._bench.layout, len(self._bench.pool)):
            self._fail(command.attempt, wrong)
        else:
            self._queue[command.attempt] = deque(command.windows)

    def forget(self, attempt: str) -> None:
        self._queue.pop(attempt, None)

    def write(self) -> None:
        """One window of the oldest export."""
        if not self._queue:
            return
        attempt, windows = next(iter(self._queue.items()))
        try:
            if windows and (lacking := self._write(self._find(attempt), windows.popleft())):
                self._fail(attempt, lacking)
            elif not windows:
                self.forget(attempt)
                self._bench.emit(Exported(attempt))
        except Exception as error:
            log.exception("export_failed", attempt=attempt)
            self._fail(attempt, f"{type(error).__name__}: {error}")

    def _write(self, sequence: Sequence | None, window: Window) -> str | None:
        """What is lacking, or None when the window is written."""
        bench, layout = self._bench, self._bench.layout
        if sequence is None:
            return "the sequence is gone"
        if window.first < window.stop and window.stop > sequence.cache.tokens:
            return f"rows up to {window.stop} of a sequence of {sequence.cache.tokens} tokens"
        if window.state and layout.state_bytes:
            if window.stop not in sequence.snapshots:
                return f"no snapshot at {window.stop}"
            sequence.snapshots[window.stop].write(layout, window, bench.pool)
        ends = (window.stop,) if window.first < window.stop else ()
        for part in layout.extent_parts(Extent(window.first, window.stop), ends, (window,)):
            bench.engine.export(sequence.cache, part, bench.memory(part))
        return None

    def _fail(self, attempt: str, detail: str) -> None:
        self.forget(attempt)
        self._bench.emit(ExportFailed(attempt, detail))
