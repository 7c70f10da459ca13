"""From batches of tokens to pieces of text: detokenized, and cut at stop strings."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from prfaas.errors import PeerUnavailable
from prfaas.flows.ports import TokenBatch
from prfaas.request import FinishReason
from prfaas.tokenizer.incremental import IncrementalDetokenizer
from prfaas.tokenizer.port import Vocabulary
from prfaas.tokenizer.stop_strings import StopStrings
from prfaas.tokenizer.text import unpack


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one batch, the text that became final with them, and how the answer ended, if it did."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None


class TextAssembler:
    """One answer's text. Stop tokens never show, whether or not the tokenizer calls them special."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(vocabulary)
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)

    def take(self, batch: TokenBatch) -> Piece:
        token_ids = tuple(unpack(batch.tokens))
        text = self._detokenizer.push([token_id for token_id in token_ids if token_id not in self._stop_token_ids])
        if batch.finish is not None:
            text += self._detokenizer.flush()
        passed = self._stops.push(text)
        if passed.stopped:
            return Piece(token_ids, passed.text, FinishReason.STOP)
        held = self._stops.flush() if batch.finish is not None else ""
        return Piece(token_ids, passed.text + held, batch.finish)


async def pieces(batches: AsyncGenerator[TokenBatch, None], text: TextAssembler) -> AsyncGenerator[Piece, None]:
    """One piece for each batch that has tokens. The one with `finish` is the last, and comes when upstream has ended:
    by itself, or cancelled because of a stop string."""
    async with aclosing(batches):
        async for batch in batches:
            piece = text.take(batch)
            if batch.finish is not None:
                async for _ in batches:  # nothing comes, but upstream closes its books
                    pass
            if piece.finish is not None:
                break
            if batch.tokens:
                yield piece
        else:
            raise PeerUnavailable("decode", "the tokens ended without a finish reason")
    yield piece
