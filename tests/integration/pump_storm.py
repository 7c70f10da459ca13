"""Many transfers at a time between two real pumps, in both directions, with aborts and lost connections at random
points, where every byte is looked at. What is moved lies in one span, or in many windows of memory that is the node's.

Memory that nobody holds carries a pattern: whatever is written to it after its release is found when it is reserved
again. What is sent is only there once its part is ready. What was delivered is compared with what was meant when it
arrives and again before it is given back.
"""

import os
import random
import selectors
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prfaas.kvcache.blocks import BlockPool
from prfaas.kvcache.layout import Extent, Part, Window, chunk_ends, whole
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    LIVENESS_S,
    NODE,
    Line,
    Pump,
    attempt_id,
    scattered,
    taken_bytes,
)

#: What lies in memory that nobody holds.
FREE = 0xA5
SMALL_TOKENS, LARGE_TOKENS = 40, 1500
#: So much of each pool is the node's own, who cuts sequences in blocks of so many tokens.
OWN_BYTES, BLOCK_TOKENS = 16 << 20, 8


@dataclass(eq=False, slots=True)
class Attempt:
    """`meant`: what each part is to be. `left`: parts that are not ready yet. `parts`: where they lie. `own`: memory of
    the node's. `abort_after`: what is to have happened when it is released unfinished; None: it may finish. `held`: who
    has reserved and not been asked to release; `over`: who has answered the release, or refused."""

    source: Pump
    target: Pump
    extent: Extent
    ends: tuple[int, ...]
    meant: list[np.ndarray]
    left: list[int]
    abort_after: int | None
    address: str
    id: str = field(default_factory=attempt_id)
    began_at: float = field(default_factory=time.monotonic)
    own: dict[Pump, tuple[Window, ...]] = field(default_factory=dict)
    reserved: dict[Pump, m.Reserved] = field(default_factory=dict)
    parts: dict[Pump, tuple[Part, ...]] = field(default_factory=dict)
    held: set[Pump] = field(default_factory=set)
    over: set[Pump] = field(default_factory=set)
    ended: dict[Pump, str] = field(default_factory=dict)
    steps: int = 0
    sent: bool = False

    def __repr__(self) -> str:
        return f"{self.id} of {self.extent}, {self.steps} steps, {len(self.left)} parts left, {self.ended}"


class Storm:
    """`lines`: by the pump they lead to; what goes through them may be cut off. `seen` counts what has happened."""

    def __init__(self, pumps: list[Pump], lines: dict[Pump, Line], draw: random.Random, *, at_a_time: int = 12) -> None:
        self._pumps, self._lines, self._draw, self._at_a_time = pumps, lines, draw, at_a_time
        self._attempts: dict[str, Attempt] = {}
        self._noise = np.frombuffer(os.urandom(2 * LAYOUT.span_bytes(LARGE_TOKENS)), np.uint8)
        self._pools = {pump: np.frombuffer(pump.pool, np.uint8) for pump in pumps}
        #: What is the node's own, and who has what of it.
        self._own_id, rows = attempt_id(), Extent(0, OWN_BYTES // LAYOUT.bytes_per_token)
        self._own = {pump: (pump.reserve(self._own_id, rows, receive=False), BlockPool(OWN_BYTES)) for pump in pumps}
        self.seen: Counter[str] = Counter()
        for pool in self._pools.values():
            pool[:] = FREE

    def run(self, transfers: int) -> None:
        """Begin so many, and see all of them to their end."""
        with selectors.DefaultSelector() as selector:
            for pump in self._pumps:
                selector.register(pump.node, selectors.EVENT_READ, pump)
            while self.seen["begun"] < transfers or self._attempts:
                while self.seen["begun"] < transfers and len(self._attempts) < self._at_a_time:
                    self._begin()
                    self._cut_sometimes()
                self._go_on()
                for key, _ in selector.select(0.002):
                    events = key.data.node.receive(0)
                    assert events is not None, "the pump has ended"
                    for event in events:
                        self._hear(key.data, event)
        for pump, pool in self._pools.items():
            assert (pool == FREE).all(), "written to after everything was given back"
            pump.release(self._own_id)
            pump.assert_baseline()

    def _begin(self) -> None:
        source, target = self._draw.sample(self._pumps, 2)
        extent, ends = self._extent()
        sizes = [part.nbytes for part in LAYOUT.extent_parts(extent, ends, scattered(extent, ends, 0, self._draw))]
        left = list(range(len(sizes)))
        if self._draw.random() < 0.3:
            self._draw.shuffle(left)
        line = self._lines.get(target) if self._draw.random() < 0.25 else None
        attempt = Attempt(
            source=source,
            target=target,
            extent=extent,
            ends=ends,
            meant=[self._some_noise(nbytes) for nbytes in sizes],
            left=left,
            abort_after=self._draw.randrange(8) if self._draw.random() < 0.4 else None,
            address=line.address if line else target.address,
        )
        for pump in (target, source):
            if not self._take_own(attempt, pump) and extent.states not in ((), (extent.stop,)):
                for each in attempt.own:
                    self._own[each][1].free(attempt.id)
                return
        self._attempts[attempt.id] = attempt
        for pump in (target, source):
            self._ask(attempt, pump)
        self.seen["begun"] += 1

    def _extent(self) -> tuple[Extent, tuple[int, ...]]:
        """A sequence, the rest of one, or what a cache has of one, and how it comes to exist."""
        tokens = self._draw.randrange(1, LARGE_TOKENS if self._draw.random() < 0.1 else SMALL_TOKENS)
        chunk_tokens = self._draw.choice([BLOCK_TOKENS, CHUNK_TOKENS])
        first = self._draw.choice([0, 0, tokens // 2])
        ends = tuple(end for end in chunk_ends(tokens, chunk_tokens) if end > first)
        some = tuple(sorted(self._draw.sample([first, *ends], min(2, len(ends)))))
        extents = [whole(tokens), whole(tokens), Extent(first, tokens, (tokens,)), Extent(first, tokens, some)]
        extent = self._draw.choice([*extents, Extent(first, tokens)])
        return extent, tuple(end for end in chunk_ends(tokens, chunk_tokens) if end > extent.first)

    def _some_noise(self, nbytes: int) -> np.ndarray:
        at = self._draw.randrange(len(self._noise) - nbytes)
        return self._noise[at : at + nbytes]

    def _take_own(self, attempt: Attempt, pump: Pump) -> bool:
        """Whether it uses memory of the node's own here."""
        reserved, blocks = self._own[pump]
        plain = attempt.extent.states in ((), (attempt.extent.stop,))
        nbytes = taken_bytes(scattered(attempt.extent, attempt.ends, 0, self._draw))
        span = None if plain and self._draw.random() < 0.5 else blocks.reserve(attempt.id, nbytes)
        if span is None:
            return False
        attempt.own[pump] = scattered(attempt.extent, attempt.ends, reserved.span + span.offset, self._draw)
        self.seen["brought"] += 1
        return True

    def _ask(self, attempt: Attempt, pump: Pump) -> None:
        fields = {"attempt": attempt.id, "extent": attempt.extent, "ttl_s": 60.0}
        fields |= {"receive": pump is attempt.target, "source": NODE}
        windows = attempt.own.get(pump)
        pump.tell(m.Reserve(**fields) if windows is None else m.Bring(**fields, windows=windows))

    def _cut_sometimes(self) -> None:
        for line in self._lines.values():
            if line.open and self._draw.random() < 0.03:
                line.cut(self._draw.randrange(1, 3))
                self.seen["cuts"] += 1

    def _go_on(self) -> None:
        for attempt in list(self._attempts.values()):
            assert time.monotonic() < attempt.began_at + 2 * LIVENESS_S, f"hangs: {attempt}"
            if self._draw.random() < 0.5 and len(attempt.reserved) + len(attempt.over - attempt.reserved.keys()) >= 2:
                attempt.steps += 1
                self._step(attempt)

    def _step(self, attempt: Attempt) -> None:
        delivered = set(attempt.ended.values()) == {"delivered"} and len(attempt.ended) == 2
        failed = "lost" in attempt.ended.values() or attempt.over
        aborted = attempt.abort_after is not None and attempt.steps > attempt.abort_after
        if delivered or failed or aborted:
            sides = sorted(attempt.held, key=self._pumps.index)
            for pump in self._draw.sample(sides, self._draw.randint(0, len(sides))):
                self._release(attempt, pump)
        elif not attempt.sent:
            self._send(attempt)
        elif attempt.left:
            count = self._draw.randint(1, len(attempt.left))
            ready, attempt.left = attempt.left[:count], attempt.left[count:]
            for index in ready:
                self._memory(attempt.source, attempt.parts[attempt.source][index])[:] = attempt.meant[index]
            attempt.source.tell(m.PartsReady(attempt.id, tuple(ready)))

    def _send(self, attempt: Attempt) -> None:
        attempt.sent = True
        attempt.source.send_to(
            attempt.target,
            attempt.id,
            attempt.reserved[attempt.target],
            attempt.extent.stop,
            attempt.address,
            chunk_ends=attempt.ends,
            urgency=self._draw.choice([1, 2, 2, 3]),
            tenant=self._draw.choice(["a", "b"]),
        )

    def _release(self, attempt: Attempt, pump: Pump) -> None:
        if pump is attempt.target and attempt.ended.get(pump) == "delivered":
            self._compare(attempt)
        attempt.held.discard(pump)
        pump.tell(m.Release(attempt.id))

    def _hear(self, pump: Pump, event: m.Event) -> None:
        if isinstance(event, m.Load):
            pump.load = event
            return
        assert isinstance(event, m.Reserved | m.Refused | m.Sent | m.Received | m.TransferLost | m.Released), event
        attempt = self._attempts[event.attempt]
        match event:
            case m.Reserved():
                self._begin_to_hold(attempt, pump, event)
            case m.Refused():
                assert not event.wrong and pump not in attempt.own, f"{event}"
                attempt.over.add(pump)
                self.seen["refused"] += 1
            case m.Released():
                self._give_back(attempt, pump)
            case _:
                self._end(attempt, pump, event)
        if len(attempt.over) == 2:
            self.seen["over"] += 1
            del self._attempts[attempt.id]

    def _begin_to_hold(self, attempt: Attempt, pump: Pump, reserved: m.Reserved) -> None:
        span = Window(attempt.extent.first, attempt.extent.stop, reserved.span, bool(attempt.extent.states))
        attempt.reserved[pump] = reserved
        attempt.held.add(pump)
        attempt.parts[pump] = LAYOUT.extent_parts(attempt.extent, attempt.ends, attempt.own.get(pump, (span,)))
        assert (self._room(attempt, pump) == FREE).all(), f"written to after its release: {attempt}"

    def _give_back(self, attempt: Attempt, pump: Pump) -> None:
        self._room(attempt, pump)[:] = FREE
        self._own[pump][1].free(attempt.id)
        attempt.over.add(pump)

    def _end(self, attempt: Attempt, pump: Pump, event: m.Sent | m.Received | m.TransferLost) -> None:
        assert pump not in attempt.ended, f"ends twice: {attempt}, {event}"
        attempt.ended[pump] = "lost" if isinstance(event, m.TransferLost) else "delivered"
        match event:
            case m.Received():
                assert not attempt.left, f"delivered before it was all there: {attempt}"
                self._compare(attempt)
                self.seen["delivered"] += 1
                self.seen["delivered in windows"] += pump in attempt.own
                self.seen["compared bytes"] += event.payload_bytes
            case m.Sent():
                self.seen["resent bytes"] += event.resent_bytes
            case m.TransferLost():
                self.seen[f"lost: {event.cause}"] += 1
                asked_for = pump not in attempt.held or attempt.over or len(attempt.held) < 2
                assert asked_for or event.cause in ("peer_gone", "no_progress", "connect"), f"{event} {attempt}"

    def _compare(self, attempt: Attempt) -> None:
        for part, meant in zip(attempt.parts[attempt.target], attempt.meant, strict=True):
            same = np.array_equal(self._memory(attempt.target, part), meant)
            assert same, f"{part} of {attempt} is not what was sent"

    def _memory(self, pump: Pump, part: Part) -> np.ndarray:
        return self._pools[pump][part.offset : part.offset + part.nbytes]

    def _room(self, attempt: Attempt, pump: Pump) -> np.ndarray:
        """All that it holds there, the padding included."""
        at, nbytes = attempt.reserved[pump].span, attempt.reserved[pump].nbytes
        if windows := attempt.own.get(pump):
            at, nbytes = min(window.offset for window in windows), taken_bytes(windows)
        return self._pools[pump][at : at + nbytes]
