"""The order of work inside an engine process: one decode step for every sequence, one chunk of prefill, and again, each
as often as its share of the time allows. A long prompt delays a step by no more than a chunk.

An attempt is in exactly one place: queued prefill, kept, waiting decode, active, or lingering. What ended, failed or
was cancelled is in none, and its windows are not touched again: commands are handled between turns. Whatever the engine
raises fails the attempts that were in that call, and the loop goes on.
"""

import time
from collections.abc import Callable
from typing import assert_never

from prfaas.engine.messages import Cancel, Cancelled, Command, Decode, Event, Export, Failed, Load, Prefill, SetShare
from prfaas.engine.port import Engine
from prfaas.node.engine_decode import DecodeBatch
from prfaas.node.engine_export import ExportQueue
from prfaas.node.engine_prefill import PrefillQueue
from prfaas.node.engine_refusal import refusal
from prfaas.node.engine_sequence import MAX_LINGERING, Lingering, Sequence
from prfaas.node.engine_share import TimeShare
from prfaas.node.engine_workbench import Workbench

#: Sequences in one decode step. Admission on the node keeps below it, and far below the bound on attempts of each kind.
MAX_BATCH = 64
MAX_ATTEMPTS = 2048


class EngineLoop:
    """Everything runs on the caller's thread."""

    def __init__(
        self,
        engine: Engine,
        pool: memoryview,
        emit: Callable[[Event], None],
        *,
        now: Callable[[], float] = time.monotonic,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self._bench, self._lingering = Workbench(engine, pool, emit, now), Lingering()
        self._prefills = PrefillQueue(self._bench, self._lingering)
        self._decodes = DecodeBatch(self._bench, self._lingering, max_batch)
        self._exports = ExportQueue(self._bench, self._find)
        self._share = TimeShare()

    def handle(self, command: Command) -> None:
        match command:
            case Cancel():
                self._forget(command.attempt)
                self._exports.forget(command.attempt)
                self._bench.emit(Cancelled(command.attempt))
            case Prefill() | Decode():
                self._accept(command)
            case Export():
                self._exports.add(command)
            case SetShare():
                self._share.set(command.prefill_share)
                self._decodes.limit(command.max_batch)
            case _:
                assert_never(command)

    def turn(self) -> bool:
        """At most one decode step, one chunk and one window of an export. True when there is more to do."""
        self._decodes.start()
        if not (self._decodes.ready and (len(self._prefills) or self._decodes.recomputing)):
            self._share.alone()
            self._decodes.step()
            self._chunk()
        else:
            if not self._share.prefill_due:
                self._share.decoded(self._timed(self._decodes.step))
            if self._share.prefill_due:
                self._share.prefilled(self._timed(self._chunk))
        self._exports.write()
        return bool(len(self._prefills) or len(self._decodes) or len(self._exports))

    def load(self) -> Load:
        return Load(
            queued_prefill_tokens=self._prefills.remaining_tokens + self._decodes.missing_tokens,
            queued_sequences=self._decodes.waiting,
            active_sequences=self._decodes.active,
            kept_sequences=len(self._prefills.kept),
            prefill_tokens_total=self._prefills.forwarded_tokens,
            decode_forwarded_tokens_total=self._decodes.forwarded_tokens,
            prefill_busy_s_total=self._prefills.busy_s,
            decode_busy_s_total=self._decodes.busy_s,
            decode_steps_total=self._decodes.steps,
            decode_step_sequences_total=self._decodes.stepped_sequences,
            decode_step_s_total=self._decodes.stepped_s,
            lingering_sequences=len(self._lingering),
        )

    def check(self) -> None:
        """Assert what must hold between turns."""
        attempts = [*self._prefills.attempts, *self._decodes.attempts, *self._lingering.attempts]
        assert len(attempts) == len(set(attempts)), "an attempt is in two places"
        assert len(self._prefills.attempts) <= MAX_ATTEMPTS and len(self._decodes) <= MAX_ATTEMPTS
        assert len(self._lingering) <= MAX_LINGERING
        self._prefills.check()
        self._decodes.check()

    def _accept(self, command: Prefill | Decode) -> None:
        attempt = command.attempt
        if reason := self._refusal(command):
            self._forget(attempt)
            self._bench.emit(Failed(attempt, reason))
        elif isinstance(command, Prefill):
            self._prefills.add(command)
        else:
            self._decodes.add(command, self._prefills.kept.pop(attempt, None))

    def _refusal(self, command: Prefill | Decode) -> str | None:
        """A second command for an attempt in hand ends the attempt: a failed one must not go on writing."""
        attempt, kept = command.attempt, self._prefills.kept.get(command.attempt)
        if attempt in self._prefills or attempt in self._decodes or attempt in self._lingering:
            return "the attempt is already in hand"
        match command:
            case Prefill() if kept is not None:
                return "the attempt is already prefilled"
            case Prefill() if len(self._prefills.attempts) == MAX_ATTEMPTS:
                return "too many prefills"
            case Decode() if len(self._decodes) == MAX_ATTEMPTS:
                return "too many sequences"
            case Decode(held=(_, *_)) if kept is not None:
                return "the attempt has both held windows and a kept sequence"
            case Decode(held=()) if command.tokens != (kept.cache.tokens if kept is not None else 0):
                return f"no sequence of {command.tokens} tokens was kept"
        return refusal(command, self._bench.engine.info, len(self._bench.pool))

    def _chunk(self) -> None:
        # A sequence that lacks part of its prompt holds a place in the batch already, so it goes first.
        if not self._decodes.recompute():
            self._prefills.chunk()

    def _timed(self, work: Callable[[], None]) -> float:
        before = self._prefills.busy_s + self._decodes.busy_s
        work()
        return self._prefills.busy_s + self._decodes.busy_s - before

    def _forget(self, attempt: str) -> None:
        self._prefills.forget(attempt)
        self._decodes.forget(attempt)
        self._lingering.forget(attempt)

    def _find(self, attempt: str) -> Sequence | None:
        return self._prefills.find(attempt) or self._decodes.find(attempt) or self._lingering.find(attempt)
