"""From batches of tokens to pieces of text: detokenized, and cut at stop strings."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from prfaas.errors import EngineFailed, PeerUnavailable
from prfaas.flows.ports import TokenBatch
from prfaas.request import FinishReason, Score
from prfaas.tokenizer.bytewise import BytewiseDetokenizer
from prfaas.tokenizer.incremental import IncrementalDetokenizer
from prfaas.tokenizer.port import Vocabulary
from prfaas.tokenizer.stop_strings import StopStrings
from prfaas.tokenizer.text import unpack


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logarithmic probability, those of the likeliest, best first, and at or in which character of the
    answer it begins."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]
    offset: int


class Piece(msgspec.Struct, frozen=True):
    """The tokens of one batch, the text that became final with them, and how the answer ended, if it did. `index` says
    which answer of several."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None
    index: int = 0
    scored: tuple[Scored, ...] = ()


class TextAssembler:
    """One answer's text. Stop tokens never show, whether or not the tokenizer calls them special."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        *,
        index: int = 0,
        scores: bool = False,
    ) -> None:
        self._detokenizer = (
            IncrementalDetokenizer(vocabulary)
            if vocabulary.bytes_of is None
            else BytewiseDetokenizer(vocabulary.bytes_of)
        )
        self._vocabulary, self._stops = vocabulary, StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._index, self._scores = index, scores
        self._one_by_one = scores or bool(stops)
        #: Whether the tokens so far end where a character ends, and any other could follow them.
        self.whole = False
        self._characters = 0

    @property
    def plain(self) -> bool:
        """Whether all that becomes of tokens is text: nothing looks for its end, or at each token."""
        return not self._one_by_one

    @property
    def has_textual_stops(self) -> bool:
        """Whether a stop token is one that would show."""
        return any(self._vocabulary.has_text(token_id) for token_id in self._stop_token_ids)

    def push(self, tokens: bytes) -> tuple[int, str]:
        """How many tokens these are, and the text that is final with them; of a `plain` answer, before its end."""
        token_ids = unpack(tokens)
        return len(token_ids), self._push(token_ids)

    def take(self, batch: TokenBatch) -> Piece:
        token_ids = tuple(unpack(batch.tokens))
        if self._one_by_one:
            return self._take_one_by_one(token_ids, batch)
        text = self._push(token_ids)
        if batch.finish is not None:
            text += self._detokenizer.flush()
        return Piece(token_ids, text, batch.finish, self._index)

    def _take_one_by_one(self, token_ids: tuple[int, ...], batch: TokenBatch) -> Piece:
        """So that a token has its place in the text, and that those after a stop string are no part of the answer,
        however they were batched."""
        if self._scores and not len(token_ids) == len(batch.scores) == len(batch.top_logits):
            raise EngineFailed("decode", "tokens came without their scores")
        text, scored = "", list[Scored]()
        for at, token_id in enumerate(token_ids):
            if self._scores:
                scored.append(self._scored(token_id, batch.scores[at], batch.top_logits[at]))
            new = self._push([token_id])
            self._characters += len(new)
            passed = self._stops.push(new)
            text += passed.text
            if passed.stopped:
                return Piece(token_ids[: at + 1], text, FinishReason.STOP, self._index, tuple(scored))
        if batch.finish is None:
            return Piece(token_ids, text, None, self._index, tuple(scored))
        passed = self._stops.push(self._detokenizer.flush())
        if passed.stopped:
            return Piece(token_ids, text + passed.text, FinishReason.STOP, self._index, tuple(scored))
        return Piece(token_ids, text + passed.text + self._stops.flush(), batch.finish, self._index, tuple(scored))

    def _scored(self, token_id: int, score: Score, best: Sequence[tuple[int, float]]) -> Scored:
        """It begins where the text of those before it ends."""
        ranked = tuple((candidate, logit - score.log_normaliser) for candidate, logit in best)
        return Scored(token_id, score.logit - score.log_normaliser, ranked, self._characters)

    def _push(self, token_ids: Sequence[int]) -> str:
        text = self._detokenizer.push([token_id for token_id in token_ids if token_id not in self._stop_token_ids])
        self.whole = self._detokenizer.whole
        return text


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
