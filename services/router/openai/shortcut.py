"""The short way of a stream's tokens: from the link to the client's socket within the call that reads them.

On the long way each token wakes the request's task and passes all the generators between the flow and the socket, which
costs more than everything that is done with it. Most tokens need none of that: there is one answer, without stop
strings, scores or usage in every chunk, and the client keeps up. What becomes of a token is the same here as there, and
where anything else comes up the tokens take the long way, at any time.
"""

from collections.abc import Mapping

import msgspec

from prfaas.flows.story import Story
from prfaas.request import TOKEN_BYTES
from services.router.http.messages import Outlet
from services.router.openai.exchange import Exchange
from services.router.openai.generation import TextAssembler
from services.router.openai.port import Backend
from services.router.openai.record import RequestLog

ENCODER = msgspec.json.Encoder()


class Spellings(dict[bytes, bytes]):
    """The text of a packed token as a JSON string; empty where it has none, or not by itself."""

    def __init__(self, bytes_of: Mapping[int, bytes] | None) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, packed: bytes) -> bytes:
        if self._bytes_of is None or len(packed) != TOKEN_BYTES:
            return b""
        try:
            text = self._bytes_of[int.from_bytes(packed, "little")].decode()
        except UnicodeDecodeError:
            return b""
        if not text:
            return b""  # and not kept: a worker may send ids that no vocabulary has
        spelled = self[packed] = ENCODER.encode(text)
        return spelled


class Shortcut:
    """Of one answer. It begins once `opened` is told of the socket."""

    def __init__(
        self,
        backend: Backend,
        story: Story,
        record: RequestLog,
        text: TextAssembler,
        exchange: Exchange,
        spellings: Spellings,
    ) -> None:
        self._backend, self._story, self._record = backend, story, record
        self._text, self._exchange, self._spellings = text, exchange, spellings

    def opened(self, outlet: Outlet) -> None:
        """All that `take` needs is at hand in its closure: it runs for every token."""
        record, text, put = self._record, self._text, outlet.put
        spellings = Spellings(None) if text.has_textual_stops else self._spellings
        before, after = self._exchange.around_text()

        def take(tokens: bytes, now_s: float) -> bool:
            if not outlet.has_room:
                return False
            if text.whole and (spelled := spellings[tokens]):
                record.output_tokens += 1
                put(before, spelled, after)
                return True
            count, new = text.push(tokens)
            record.output_tokens += count
            if new:
                put(before, ENCODER.encode(new), after)
            return True

        self._backend.divert(self._story, take)
