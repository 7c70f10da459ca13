"""A sequence's states as they were at one boundary, copied: the sequence goes on and overwrites its own in place."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.engine.port import Cache, Engine
from prfaas.kvcache.layout import Extent, KvLayout, Part, Window


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states at `tokens`, laid out as a window that has only states. Empty where the model has none."""

    tokens: int
    memory: bytes

    def write(self, layout: KvLayout, window: Window, pool: memoryview) -> None:
        """Copy the states into a window that ends at this boundary."""
        assert window.state and window.stop == self.tokens, "the states of another boundary"
        source = memoryview(self.memory)
        for ours, theirs in zip(_states(layout, _alone(self.tokens)), _states(layout, window), strict=True):
            pool[theirs.offset : theirs.offset + theirs.nbytes] = source[ours.offset : ours.offset + ours.nbytes]


def take_snapshot(engine: Engine, cache: Cache) -> Snapshot:
    """The states of the sequence where it ends now."""
    layout, window = engine.info.layout, _alone(cache.tokens)
    memory = bytearray(layout.window_bytes(0, state=True))
    for part in _states(layout, window):
        engine.export(cache, part, memoryview(memory)[part.offset : part.offset + part.nbytes])
    return Snapshot(cache.tokens, bytes(memory))


def _alone(tokens: int) -> Window:
    return Window(tokens, tokens, 0, state=True)


def _states(layout: KvLayout, window: Window) -> Iterable[Part]:
    return layout.extent_parts(Extent(window.stop, window.stop, (window.stop,)), (), (window,))
