"""From batches of tokens to pieces of text."""

from collections.abc import AsyncGenerator, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import EngineFailed, PeerUnavailable
from prfaas.flows.ports import TokenBatch
from prfaas.request import FinishReason, Score
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer, pack, unpack
from services.router.openai.generation import Piece, Scored, TextAssembler, pieces
from tests.unit.tokenizer.byte_level import write_model_dir

EOS = 1


class Letters:
    """One token for each character."""

    bytes_of = None

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


@pytest.mark.parametrize("size", [1, 2, 3, 20])
async def test_tokens_after_a_stop_string_are_no_part_of_the_answer(size: int):
    """However they were batched: usage does not depend on how busy a worker is."""
    text = "one END two three"
    batches = [batch(text[at : at + size]) for at in range(0, len(text), size)]
    shown = await run(Upstream(*batches), "END")
    assert [token_id for piece in shown for token_id in piece.token_ids] == [ord(letter) for letter in "one END"]
    assert "".join(piece.text for piece in shown) == "one "


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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("你好🙂é the fox")), min_size=1, max_size=40)


@given(text=TEXT, at=st.integers(0, 39), length=st.integers(1, 6), batch=st.integers(1, 5), scores=st.booleans())
@settings(max_examples=300)
def test_a_stop_string_may_lie_across_any_tokens(
    tokenizer: TextTokenizer, text: str, at: int, length: int, batch: int, scores: bool
):
    """Wherever the borders of tokens and of batches are, also within a character, the text ends right before it."""
    stop = text[at % len(text) :][:length]
    token_ids = unpack(tokenizer.encode(text, add_special_tokens=False))
    assembler = TextAssembler(tokenizer, [stop], [], scores=scores)
    shown = ""
    for start in range(0, len(token_ids), batch):
        arrived = token_ids[start : start + batch]
        piece = assembler.take(
            TokenBatch(
                tokens=pack(arrived),
                top_logits=tuple(((token_id, 1.0),) for token_id in arrived),
                scores=tuple(Score(1.0, 2.0) for _ in arrived),
                finish=FinishReason.LENGTH if start + batch >= len(token_ids) else None,
            )
        )
        shown += piece.text
        if piece.finish is not None:
            break
    assert (shown, piece.finish) == (text[: text.index(stop)], FinishReason.STOP)


def test_tokens_have_their_probabilities_and_places(tokenizer: TextTokenizer):
    """The normaliser is taken off; a token within a character begins where that character does."""
    token_ids = unpack(tokenizer.encode("a\U0001f980b", add_special_tokens=False))
    assert len(token_ids) > 4
    assembler = TextAssembler(tokenizer, [], [], scores=True)
    scored: list[Scored] = []
    for token_id in token_ids:
        best = ((token_id, 3.0), (5, 2.0))
        taken = TokenBatch(tokens=pack([token_id]), top_logits=(best,), scores=(Score(3.0, 3.5),))
        scored += assembler.take(taken).scored
    assert [each.token_id for each in scored] == list(token_ids)
    assert {each.logprob for each in scored} == {-0.5}
    assert scored[0].best == ((token_ids[0], -0.5), (5, -1.5))
    assert [each.offset for each in scored] == [0, *[1] * (len(token_ids) - 2), 2]


def test_tokens_without_their_scores_are_a_failure(tokenizer: TextTokenizer):
    """Never probabilities that belong to other tokens, or none."""
    with pytest.raises(EngineFailed):
        TextAssembler(tokenizer, [], [], scores=True).take(TokenBatch(tokens=pack([70])))
