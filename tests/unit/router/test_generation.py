"""From batches of tokens to pieces of text."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from prfaas.errors import PeerUnavailable
from prfaas.flows.ports import TokenBatch
from prfaas.request import FinishReason
from prfaas.tokenizer.text import pack
from services.router.openai.generation import Piece, TextAssembler, pieces

EOS = 1


class Letters:
    """One token for each character."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def has_text(self, token_id: int) -> bool:
        return True


class Upstream:
    """Sends its batches, then ends; knows whether it has ended, and whether by itself."""

    def __init__(self, *batches: TokenBatch) -> None:
        self._batches, self.completed, self.ended = batches, False, False

    async def run(self) -> AsyncGenerator[TokenBatch, None]:
        try:
            for batch in self._batches:
                yield batch
            self.completed = True
        finally:
            self.ended = True


def batch(text: str, finish: FinishReason | None = None) -> TokenBatch:
    return TokenBatch(tokens=pack([ord(letter) for letter in text]), finish=finish)


async def run(upstream: Upstream, *stops: str) -> list[Piece]:
    shown = []
    async for piece in pieces(upstream.run(), TextAssembler(Letters(), stops, [EOS])):
        assert upstream.ended == (piece.finish is not None)
        shown.append(piece)
    return shown


async def test_batches_become_pieces():
    """Each with its tokens; the finish comes when upstream has closed its books."""
    upstream = Upstream(batch("ab"), batch("c", FinishReason.LENGTH))
    assert await run(upstream) == [Piece((97, 98), "ab"), Piece((99,), "c", FinishReason.LENGTH)]
    assert upstream.completed


async def test_a_stop_string_ends_the_answer_and_what_is_behind_it():
    """Across batches: the text before it is shown, upstream is closed without running on."""
    upstream = Upstream(batch("one E"), batch("ND two"), batch("three", FinishReason.LENGTH))
    shown = await run(upstream, "END")
    assert ("".join(piece.text for piece in shown), shown[-1].finish) == ("one ", FinishReason.STOP)
    assert not upstream.completed


async def test_a_stop_string_in_the_last_batch_wins_over_its_finish():
    """The answer stopped, it was not cut off."""
    assert await run(Upstream(batch("aEND", FinishReason.LENGTH)), "END") == [
        Piece((97, 69, 78, 68), "a", FinishReason.STOP)
    ]


async def test_what_was_held_back_shows_at_the_end():
    """It turned out to be no stop string."""
    shown = await run(Upstream(batch("aE"), batch("N", FinishReason.LENGTH)), "END")
    assert [piece.text for piece in shown] == ["a", "EN"]


async def test_the_stop_token_counts_but_does_not_show():
    """Whether or not the tokenizer calls it special."""
    assert await run(Upstream(batch("a\x01", FinishReason.STOP))) == [Piece((97, EOS), "a", FinishReason.STOP)]


async def test_an_end_without_a_reason_is_a_failure():
    """Never an answer that looks complete."""
    with pytest.raises(PeerUnavailable):
        await run(Upstream(batch("a")))
    with pytest.raises(PeerUnavailable):
        await run(Upstream())
