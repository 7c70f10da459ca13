"""The simulated order of work is that of the real engine loop: both are given the same work and the same costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import Namespace
from prfaas.curve import Curve
from prfaas.engine.messages import Decode, Event, Finished, Prefill, Prefilled, SetShare, Tokens
from prfaas.engine.port import EngineInfo, StepInput, StepOutput
from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec, chunk_ends
from prfaas.node.engine_loop import EngineLoop
from prfaas.profile import DecodeProfile, Profile
from prfaas.request import TOKEN_BYTES, AttemptId
from prfaas.sim.decode_batch import Sequence
from prfaas.sim.kernel import Kernel
from prfaas.sim.prefill_queue import PrefillJob
from prfaas.sim.step_times import StepTimes
from prfaas.sim.turn_engine import TurnEngine

CHUNK = 64
STEPS = DecodeProfile(base_s=0.01, per_sequence_s=0.003, max_batch=3)
PROFILE = Profile(
    hardware="h",
    model="m",
    prefill=Curve.through([(100, 0.1), (200, 0.25), (400, 0.7)], from_zero=True),
    kv=Curve.through([(0, 1.0), (1, 2.0)]),
    decode=STEPS,
)
#: (seconds after the last one, tokens to prefill or None, tokens to decode or None)
Work = list[tuple[float, int | None, int | None]]


class Timed:
    """An engine port whose work takes its time on a clock of its own, and makes nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        layout = KvLayout(((TensorSpec("kv", TensorKind.TOKENS, "uint8", (8,)),),))
        self.info = EngineInfo(
            model="m",
            namespace=Namespace("n"),
            layout=layout,
            chunk_tokens=CHUNK,
            max_context_tokens=4096,
            vocab_tokens=16,
        )

    class Cache:
        tokens = 0

    def new_cache(self) -> "Timed.Cache":
        return self.Cache()

    def prefill(self, cache, chunk, on_layer) -> None:
        start, cache.tokens = cache.tokens, cache.tokens + len(chunk) // TOKEN_BYTES
        self.now += PROFILE.prefill_s(cache.tokens, start)

    def step(self, batch: list[StepInput]) -> list[StepOutput]:
        self.now += STEPS.step_s(len(batch))
        for each in batch:
            each.cache.tokens += 1
        return [StepOutput(1) for _ in batch]


def real(work: Work, share: float | None) -> dict[str, float]:
    """When what ends in the real loop, on a clock that only work moves, or the wait for more of it."""
    engine, ended = Timed(), dict[str, float]()

    def emit(event: Event) -> None:
        match event:
            case Prefilled(attempt=attempt):
                ended[f"{attempt} prefilled"] = engine.now
            case Tokens(attempt=attempt):
                ended.setdefault(f"{attempt} first", engine.now)
            case Finished(attempt=attempt):
                ended[f"{attempt} last"] = engine.now
            case _:
                pass

    loop = EngineLoop(engine, memoryview(bytearray(1)), emit, now=lambda: engine.now, max_batch=STEPS.max_batch)
    if share is not None:
        loop.handle(SetShare(prefill_share=share, max_batch=STEPS.max_batch))
    arrivals = list(zip(itertools.accumulate(gap for gap, _, _ in work), work, strict=True))
    more = False
    while arrivals or more:
        if not more and arrivals[0][0] > engine.now:
            engine.now = arrivals[0][0]
        while arrivals and arrivals[0][0] <= engine.now:
            _, (_, prefill, decode) = arrivals.pop(0)
            number = len(work) - len(arrivals) - 1
            if prefill is not None:
                tokens, ends = bytes(TOKEN_BYTES * (prefill + 1)), chunk_ends(prefill, CHUNK)
                loop.handle(Prefill(attempt=f"p{number}", prompt=tokens, stop=prefill, ends=ends))
            if decode is not None:
                prompt = bytes(TOKEN_BYTES)
                loop.handle(Decode(attempt=f"d{number}", prompt=prompt, tokens=0, max_tokens=decode))
        more = loop.turn()
        loop.check()
    return ended


def simulated(work: Work, share: float | None) -> dict[str, float]:
    kernel, ended = Kernel(0), dict[str, float]()
    engine = TurnEngine(kernel, PROFILE, STEPS, chunk_tokens=CHUNK, token_batch=1, step_times=StepTimes())
    if share is not None:
        engine.set_share(share, STEPS.max_batch)

    def done(name: str) -> None:
        ended.setdefault(name, kernel.now())

    def arrive(number: int, prefill: int | None, decode: int | None) -> None:
        now = kernel.now()
        if prefill is not None:
            engine.prefill(
                PrefillJob(
                    attempt=AttemptId(f"p{number}"),
                    tokens=prefill,
                    arrived_s=now,
                    begin=lambda: (0, 0.0),
                    feed=lambda rate: None,
                    done=lambda queue_s, compute_s: done(f"p{number} prefilled"),
                    uncached_tokens=prefill + 1,
                )
            )
        if decode is not None:
            engine.decode(
                Sequence(
                    AttemptId(f"d{number}"),
                    decode,
                    now,
                    lambda drawn: (done(f"d{number} first"), drawn.finished and done(f"d{number} last")),
                )
            )

    for number, at in enumerate(itertools.accumulate(gap for gap, _, _ in work)):
        kernel.call_later(at, lambda number=number: arrive(number, *work[number][1:]))
    kernel.run_until(1000.0)
    engine.check()
    return ended


@given(
    st.lists(
        st.tuples(
            # Nothing comes in the very moment something else does, or something ends.
            st.integers(0, 300).map(lambda ms: ms / 1000 + 1.7e-5),
            st.tuples(st.integers(1, 300), st.none()) | st.tuples(st.none(), st.integers(1, 20)),
        ).map(lambda drawn: (drawn[0], *drawn[1])),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([None, 0.0, 0.3, 0.5, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_everything_ends_when_it_does_in_the_real_loop(work, share):
    """Prefills, first and last tokens, whatever comes when and whatever share prefill has."""
    assert simulated(work, share) == pytest.approx(real(work, share), abs=1e-9)
