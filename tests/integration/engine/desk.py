"""An engine loop over a real engine and a pool, and what tests of resuming do with it: keep a prompt's blocks and
states as a cache pool would, begin from them, and compare with a run that had nothing.

A resumed run may have other chunks than the cold one, so its logits are close, not equal. Where the cold run's two best
tokens are as good as tied, the other one is no error, and from there on the two cannot be compared.
"""

from collections.abc import Iterable, Sequence

import pytest

from prfaas.engine.messages import Cancel, Command, Decode, Event, Export, Exported, Prefill, Prefilled, Tokens
from prfaas.engine.port import Engine
from prfaas.kvcache.layout import Window, chunk_ends
from prfaas.node.engine_loop import EngineLoop
from tests.integration.engine.engine_scenes import packed

UNIT = 64
#: Of the spread between the best logits and the worst of the best.
TIE = 1e-4
CLOSE = 1e-3

#: The token drawn and the best logits.
Drawn = tuple[int, tuple[tuple[int, float], ...]]


class Desk:
    """A pool in which nothing is given back."""

    def __init__(self, engine: Engine, pool_bytes: int = 64 << 20) -> None:
        self.engine, self.layout = engine, engine.info.layout
        self.pool, self._placed = bytearray(pool_bytes), 0
        self.events: list[Event] = []
        self.loop = EngineLoop(engine, memoryview(self.pool), self.events.append)

    def place(self, first: int, stop: int, *, state: bool = False) -> Window:
        window = Window(first, stop, self._placed, state)
        self._placed += self.layout.window_bytes(stop - first, state)
        assert self._placed <= len(self.pool)
        return window

    def region(self, window: Window) -> memoryview:
        nbytes = self.layout.window_bytes(window.stop - window.first, window.state)
        return memoryview(self.pool)[window.offset : window.offset + nbytes]

    def do(self, *commands: Command) -> list[Event]:
        """Each to its end; what is said meanwhile."""
        said = len(self.events)
        for command in commands:
            self.loop.handle(command)
            while self.loop.turn():
                self.loop.check()
        return self.events[said:]

    def prefill(self, attempt: str, ids: Sequence[int], stop: int, boundaries: Iterable[int] = ()) -> Prefill:
        """From the start, with a snapshot at each boundary."""
        checkpoints = tuple(sorted(boundaries))
        ends = tuple(sorted({*chunk_ends(stop, self.engine.info.chunk_tokens), *checkpoints}))
        return Prefill(attempt=attempt, prompt=packed(ids), stop=stop, ends=ends, checkpoints=checkpoints)

    def decode(self, attempt: str, ids: Sequence[int], count: int, **more: object) -> Decode:
        """Of the sequence that is kept."""
        held = len(ids) - 1
        return Decode(attempt=attempt, prompt=packed(ids), tokens=held, max_tokens=count, top_logits=8, **more)  # type: ignore[arg-type]

    def resumed(
        self, attempt: str, ids: Sequence[int], stop: int, held: tuple[Window, ...], out: Window | None = None
    ) -> Prefill:
        start = held[-1].stop
        ends = tuple(end for end in chunk_ends(stop, self.engine.info.chunk_tokens) if end > start)
        return Prefill(attempt=attempt, prompt=packed(ids), stop=stop, ends=ends, held=held, out=out)

    def cold(self, ids: Sequence[int], count: int) -> list[Drawn]:
        said = self.do(self.prefill("cold", ids, len(ids) - 1), self.decode("cold", ids, count))
        return drawn(said)

    def warm(self, ids: Sequence[int], held: tuple[Window, ...], count: int) -> list[Drawn]:
        """Begun with these windows; nothing that they hold is computed again."""
        stop = len(ids) - 1
        said = self.do(self.resumed("warm", ids, stop, held), self.decode("warm", ids, count))
        (done,) = [event for event in said if isinstance(event, Prefilled)]
        assert done.tokens == stop - held[-1].stop
        return drawn(said)


class Cached:
    """What a cache pool has of a prompt: its blocks, and the states at some boundaries."""

    def __init__(self, desk: Desk, ids: Sequence[int], boundaries: Sequence[int]) -> None:
        self.blocks = [desk.place(at, at + UNIT) for at in range(0, boundaries[-1], UNIT)]
        self.states = {at: desk.place(at, at, state=True) for at in boundaries}
        prefill = desk.prefill("first", ids, len(ids) - 1, boundaries)
        said = desk.do(prefill, Export("first", (*self.blocks, *self.states.values())), Cancel("first"))
        assert Exported("first") in said

    def held(self, boundary: int) -> tuple[Window, ...]:
        return (*self.blocks[: boundary // UNIT], self.states[boundary])


def drawn(said: Sequence[Event]) -> list[Drawn]:
    tokens = [event for event in said if isinstance(event, Tokens)]
    return [(int.from_bytes(event.tokens, "little"), event.top_logits[0]) for event in tokens]


def same(cold: Sequence[Drawn], warm: Sequence[Drawn]) -> bool:
    """Equal tokens with close logits up to the end, or up to a tie."""
    assert len(cold) == len(warm) > 0
    for (expected, best), (token, found) in zip(cold, warm, strict=True):
        if token != expected:
            return best[0][1] - best[1][1] < TIE * (best[0][1] - best[-1][1])
        if found[0][1] != pytest.approx(best[0][1], abs=CLOSE):
            return False
    return True
