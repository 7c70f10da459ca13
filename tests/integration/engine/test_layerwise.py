"""What a prefill tells its pump, and when, on real models: a layer's part leaves while the next layer computes."""

from collections import Counter
from contextlib import ExitStack
from functools import partial

from prfaas.engine.hf import HfEngine
from prfaas.engine.messages import Event, Prefill, Prefilled, RowsReady
from prfaas.engine.port import Cache
from prfaas.kvcache.layout import Part, TensorKind, Window, chunk_ends
from prfaas.node.engine_loop import EngineLoop
from tests.integration.engine.engine_scenes import packed, prompt

TOKENS = 700


class Observed:
    """A real engine in its loop: which layer began, which layer was announced up to where, in the order in which it
    happened."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine, self.info = engine, engine.info
        self.log: list[int | tuple[int, int]] = []
        self.exported: Counter[int] = Counter()
        self.ended = False

    def run(self, tokens: int) -> None:
        layers = self._engine._model.model.layers
        pool = memoryview(bytearray(self.info.layout.span_bytes(tokens)))
        loop = EngineLoop(self, pool, self._told)
        ends, out = chunk_ends(tokens, self.info.chunk_tokens), Window(0, tokens, 0, state=True)
        loop.handle(Prefill(attempt="a", prompt=packed(prompt(tokens)), stop=tokens, ends=ends, out=out))
        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                hooks.callback(layer.register_forward_pre_hook(partial(self._began, number)).remove)
            while loop.turn():
                loop.check()

    def _began(self, layer: int, *_: object) -> None:
        self.log.append(layer)

    def _told(self, event: Event) -> None:
        match event:
            case RowsReady():
                self.log.append((event.layer, event.stop))
            case Prefilled():
                self.ended = True

    # The engine port.

    def export(self, cache: Cache, part: Part, into: memoryview) -> None:
        self.exported[part.index] += 1
        self._engine.export(cache, part, into)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_each_part_is_announced_before_the_next_layer_begins(engine: HfEngine) -> None:
    """In every chunk the KV of a layer, and in the last one also its state: never with a later layer's, never at the
    end of the chunk. Each part is written once."""
    observed = Observed(engine)
    observed.run(TOKENS)
    layout, ends = engine.info.layout, chunk_ends(TOKENS, engine.info.chunk_tokens)
    parts = layout.parts(TOKENS, ends)
    expected: list[int | tuple[int, int]] = []
    for end in ends:
        for layer in range(len(layout.layers)):
            expected.append(layer)
            expected += [(layer, end)] if any((part.layer, part.stop) == (layer, end) for part in parts) else []
    assert len(ends) == 3 and observed.ended
    assert observed.log == expected
    assert observed.exported == Counter(part.index for part in parts)


def test_states_leave_one_after_the_other_within_the_last_chunk(engine: HfEngine) -> None:
    """What is left to send after the last layer is no more than that layer's part of the last chunk."""
    observed = Observed(engine)
    observed.run(TOKENS)
    layout, ends = engine.info.layout, chunk_ends(TOKENS, engine.info.chunk_tokens)
    parts = layout.parts(TOKENS, ends)
    last = len(layout.layers) - 1
    began_last = max(at for at, entry in enumerate(observed.log) if entry == last)
    late = [entry for entry in observed.log[began_last:] if isinstance(entry, tuple)]
    assert late == [(last, TOKENS)]
    states = {part.layer for part in parts if layout.layers[part.layer][part.tensor].kind is TensorKind.STATE}
    early = [entry[0] for entry in observed.log[:began_last] if isinstance(entry, tuple) and entry[1] == TOKENS]
    assert states - {last} <= set(early)
