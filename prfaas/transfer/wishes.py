"""What the node wants of the sending side: hold an attempt, send it, more of it is ready, let go of it."""

from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.attempts import Answer, Lost, Opened, Phase
from prfaas.transfer.books import Books
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import offer_for
from prfaas.transfer.outbound import Outbound
from prfaas.transfer.outgoing import Begin, Command, PartsReady, Urgency


class Wishes:
    def __init__(self, layout: KvLayout, books: Books) -> None:
        self._layout, self._books = layout, books

    def opened(self, event: Opened) -> list[Command]:
        outbound = Outbound(
            id=event.attempt,
            extent=event.extent,
            windows=event.windows,
            generation=event.generation,
            expires_at=event.expires_at,
            awaited=False,
        )
        self._books.attempts.open(outbound)
        return []

    def begin(self, event: Begin) -> list[Command]:
        attempt = self._books.attempts.get(event.attempt)
        if attempt is None:
            return [Lost(event.attempt, Cause.UNKNOWN_ATTEMPT, "nothing is reserved")]
        if attempt.phase is not Phase.RESERVED:
            return []
        attempt.awaited, attempt.begun_at = True, event.now
        if not attempt.parts:
            attempt.ready_at = event.now
        attempt.extent = attempt.extent if event.extent is None else event.extent
        try:
            attempt.offer, attempt.pieces = offer_for(
                self._layout, attempt.extent, event.chunk_ends, attempt.windows, self._books.params.piece_bytes
            )
        except ValueError as error:
            return self._books.fail(attempt, Cause.OFFER_MISMATCH, str(error))
        if unknown := self._unknown(attempt, attempt.parts):
            return self._books.fail(attempt, Cause.UNEXPECTED_PART, unknown)
        attempt.to, attempt.urgency, attempt.tenant, attempt.weight = (
            event.to,
            max(event.urgency, Urgency.FINISHING),
            event.tenant,
            event.weight,
        )
        for index in attempt.parts:
            attempt.enqueue(index)
        attempt.move(Phase.OFFERED)
        line = self._books.fleet.line(attempt.to)
        line.attempts[attempt.id] = attempt
        self._books.ask(attempt)
        return self._books.fleet.stir(line, self._books.now)

    def ready(self, event: PartsReady) -> list[Command]:
        attempt = self._books.attempts.get(event.attempt)
        if attempt is None or not (attempt.awaited or attempt.phase is Phase.RESERVED):
            return []
        fresh = [index for index in dict.fromkeys(event.parts) if index not in attempt.parts]
        attempt.ready_at = event.now
        if attempt.phase is Phase.RESERVED:
            attempt.parts.update(dict.fromkeys(fresh))
            return []
        if unknown := self._unknown(attempt, fresh):
            return self._books.fail(attempt, Cause.UNEXPECTED_PART, unknown)
        attempt.parts.update(dict.fromkeys(fresh))
        for index in fresh:
            attempt.enqueue(index)
        return self._books.moved(attempt)

    def _unknown(self, attempt: Outbound, parts: "list[int] | dict[int, None]") -> str:
        count = len(attempt.pieces.parts)
        return next((f"part {index} of {count}" for index in parts if not 0 <= index < count), "")

    def release(self, attempt_id: str) -> list[Command]:
        attempt = self._books.attempts.get(attempt_id)
        if attempt is None:
            return [Answer(attempt_id)]
        attempt.asked = True
        return self._books.close(attempt, Cause.ABORTED, "released")
