"""Many transfers at a time between two real pumps, in both directions, with aborts and lost connections at random
points, where every byte is looked at.

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

from prfaas.kvcache.layout import Part, chunk_ends
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import CHUNK_TOKENS, LAYOUT, LIVENESS_S, NODE, Line, Pump, attempt_id

#: What lies in memory that nobody holds.
FREE = 0xA5
SMALL_TOKENS, LARGE_TOKENS = 40, 1500


@dataclass(eq=False, slots=True)
class Attempt:
    """`left`: parts that are not ready yet. `abort_after`: what is to have happened when it is released unfinished;
    None: it may finish. `held`: who has reserved and not been asked to release; `over`: who has answered the release,
    or refused."""

    source: Pump
    target: Pump
    tokens: int
    meant: np.ndarray
    left: list[Part]
    abort_after: int | None
    address: str
    id: str = field(default_factory=attempt_id)
    began_at: float = field(default_factory=time.monotonic)
    spans: dict[Pump, m.Reserved] = field(default_factory=dict)
    held: set[Pump] = field(default_factory=set)
    over: set[Pump] = field(default_factory=set)
    ended: dict[Pump, str] = field(default_factory=dict)
    steps: int = 0
    sent: bool = False

    def __repr__(self) -> str:
        return f"{self.id} of {self.tokens} tokens, {self.steps} steps, {len(self.left)} parts left, {self.ended}"


class Storm:
    """`lines`: by the pump they lead to; what goes through them may be cut off. `seen` counts what has happened."""

    def __init__(self, pumps: list[Pump], lines: dict[Pump, Line], draw: random.Random, *, at_a_time: int = 12) -> None:
        self._pumps, self._lines, self._draw, self._at_a_time = pumps, lines, draw, at_a_time
        self._attempts: dict[str, Attempt] = {}
        self._noise = np.frombuffer(os.urandom(2 * LAYOUT.span_bytes(LARGE_TOKENS)), np.uint8)
        self._pools = {pump: np.frombuffer(pump.pool, np.uint8) for pump in pumps}
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
            pump.assert_baseline()

    def _begin(self) -> None:
        source, target = self._draw.sample(self._pumps, 2)
        tokens = self._draw.randrange(1, LARGE_TOKENS if self._draw.random() < 0.1 else SMALL_TOKENS)
        left = list(LAYOUT.parts(tokens, chunk_ends(tokens, CHUNK_TOKENS)))
        if self._draw.random() < 0.3:
            self._draw.shuffle(left)
        nbytes = LAYOUT.span_bytes(tokens)
        at = self._draw.randrange(len(self._noise) - nbytes)
        line = self._lines.get(target) if self._draw.random() < 0.25 else None
        attempt = Attempt(
            source=source,
            target=target,
            tokens=tokens,
            meant=self._noise[at : at + nbytes],
            left=left,
            abort_after=self._draw.randrange(8) if self._draw.random() < 0.4 else None,
            address=line.address if line else target.address,
        )
        self._attempts[attempt.id] = attempt
        for pump in (target, source):
            reserve = m.Reserve(attempt=attempt.id, tokens=tokens, ttl_s=60.0, receive=pump is target, source=NODE)
            pump.tell(reserve)
        self.seen["begun"] += 1

    def _cut_sometimes(self) -> None:
        for line in self._lines.values():
            if line.open and self._draw.random() < 0.03:
                line.cut(self._draw.randrange(1, 3))
                self.seen["cuts"] += 1

    def _go_on(self) -> None:
        for attempt in list(self._attempts.values()):
            assert time.monotonic() < attempt.began_at + 2 * LIVENESS_S, f"hangs: {attempt}"
            if self._draw.random() < 0.5 and len(attempt.spans) + len(attempt.over) >= 2:
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
            span = self._span(attempt, attempt.source)
            for part in ready:
                place = slice(part.offset, part.offset + part.nbytes)
                span[place] = attempt.meant[place]
            attempt.source.tell(m.PartsReady(attempt.id, tuple(part.index for part in ready)))

    def _send(self, attempt: Attempt) -> None:
        attempt.sent = True
        attempt.source.send_to(
            attempt.target,
            attempt.id,
            attempt.spans[attempt.target],
            attempt.tokens,
            attempt.address,
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
                attempt.spans[pump] = event
                attempt.held.add(pump)
                assert (self._span(attempt, pump) == FREE).all(), f"written to after its release: {attempt}"
            case m.Refused():
                attempt.over.add(pump)
                self.seen["refused"] += 1
            case m.Released():
                self._span(attempt, pump)[:] = FREE
                attempt.over.add(pump)
            case _:
                self._end(attempt, pump, event)
        if len(attempt.over) == 2:
            self.seen["over"] += 1
            del self._attempts[attempt.id]

    def _end(self, attempt: Attempt, pump: Pump, event: m.Sent | m.Received | m.TransferLost) -> None:
        assert pump not in attempt.ended, f"ends twice: {attempt}, {event}"
        attempt.ended[pump] = "lost" if isinstance(event, m.TransferLost) else "delivered"
        match event:
            case m.Received():
                assert not attempt.left, f"delivered before it was all there: {attempt}"
                self._compare(attempt)
                self.seen["delivered"] += 1
                self.seen["compared bytes"] += event.payload_bytes
            case m.Sent():
                self.seen["resent bytes"] += event.resent_bytes
            case m.TransferLost():
                self.seen[f"lost: {event.cause}"] += 1
                asked_for = pump not in attempt.held or attempt.over or len(attempt.held) < 2
                assert asked_for or event.cause in ("peer_gone", "no_progress", "connect"), f"{event} {attempt}"

    def _compare(self, attempt: Attempt) -> None:
        span = self._span(attempt, attempt.target)
        for part in LAYOUT.parts(attempt.tokens, chunk_ends(attempt.tokens, CHUNK_TOKENS)):
            place = slice(part.offset, part.offset + part.nbytes)
            assert np.array_equal(span[place], attempt.meant[place]), f"{part} of {attempt} is not what was sent"

    def _span(self, attempt: Attempt, pump: Pump) -> np.ndarray:
        reserved = attempt.spans[pump]
        return self._pools[pump][reserved.span : reserved.span + reserved.nbytes]
