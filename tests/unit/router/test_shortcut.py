"""The short way of a stream's tokens: the client sees what it would have seen on the long way."""

from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.flows.ports import TokenBatch
from prfaas.flows.story import Story
from prfaas.request import FinishReason, Request, RequestId, Sampling
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer, pack, unpack
from services.router.openai.account import Account
from services.router.openai.chat import CHAT
from services.router.openai.completions import COMPLETIONS
from services.router.openai.exchange import Exchange
from services.router.openai.generation import Piece, TextAssembler
from services.router.openai.record import RequestLog
from services.router.openai.shortcut import Shortcut, Spellings
from tests.unit.tokenizer.byte_level import EOS_ID, write_model_dir

TEXT = 'Grüße, "señor"\n你好世界 🙂👍🏽 the fox\t\\'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))


class Diverting:
    """A backend, as far as it diverts tokens."""

    def __init__(self) -> None:
        self.take: Callable[[bytes, float], bool] = lambda tokens, now_s: False

    def divert(self, story: Story, take: Callable[[bytes, float], bool]) -> None:
        self.take = take


class Socket:
    def __init__(self, sent: list[bytes]) -> None:
        self.has_room, self._sent = True, sent

    def put(self, before: bytes, text: bytes, after: bytes) -> None:
        self._sent.append(before + text + after)


class Answering:
    """One answer, each token of which takes one of the two ways."""

    def __init__(self, tokenizer: TextTokenizer, endpoint=CHAT, stops: tuple[int, ...] = ()) -> None:
        request = Request(id=RequestId("r"), model="m", prompt=pack([5]), sampling=Sampling(max_tokens=9))
        self.record, self.sent = RequestLog(), list[bytes]()
        account = Account(
            requests=[request],
            stories=[Story()],
            choices=1,
            record=self.record,
            received_s=0.0,
            now=lambda: 1.0,
            created=7,
        )
        self.text = TextAssembler(tokenizer, (), stops)
        self.exchange = Exchange(endpoint=endpoint, account=account, tokenizer=tokenizer, echoes=[""])
        self.backend, self.socket = Diverting(), Socket(self.sent)
        spellings = Spellings(tokenizer.bytes_of)
        shortcut = Shortcut(self.backend, account.stories[0], self.record, self.text, self.exchange, spellings)
        self.open = lambda: shortcut.opened(self.socket)

    async def answer(self, tokens: list[bytes], short: list[bool]) -> list[bytes]:
        first = self.text.take(TokenBatch(tokens=tokens[0]))
        async for chunk in self.exchange.stream(first, self._rest(tokens[1:], short)):
            self.sent.append(chunk)
            self.open()
        return self.sent

    async def _rest(self, tokens: list[bytes], short: list[bool]) -> AsyncGenerator[Piece, None]:
        for token, wanted in zip(tokens, short, strict=True):
            if not wanted or not self.backend.take(token, 0.0):
                yield self.text.take(TokenBatch(tokens=token))
        yield self.text.take(TokenBatch(tokens=b"", finish=FinishReason.LENGTH))


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS], ids=["chat", "completions"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_the_way_of_a_token_does_not_show(tokenizer, endpoint, data):
    """Whichever of them take the short way, in events of one token or several, the client gets the same bytes, also
    where characters need several tokens and where special tokens come between; and all are counted."""
    ids = list(unpack(tokenizer.encode(TEXT, add_special_tokens=True)))
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=12))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(ids), max_size=len(ids)))
    tokens, at = [], 0
    for size in sizes:
        if at < len(ids):
            tokens.append(pack(ids[at : at + size]))
            at += size
    short = data.draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    long_way, mixed = Answering(tokenizer, endpoint), Answering(tokenizer, endpoint)
    expected = await long_way.answer(tokens, [False] * len(short))
    assert await mixed.answer(tokens, short) == expected
    assert mixed.record.output_tokens == long_way.record.output_tokens == len(ids)


async def test_nothing_is_sent_to_a_client_that_does_not_read(tokenizer):
    """Its tokens wait on the long way, which waits for the client."""
    answering = Answering(tokenizer)
    answering.open()
    answering.socket.has_room = False
    assert not answering.backend.take(pack([70]), 0.0)
    assert (answering.sent, answering.record.output_tokens) == ([], 0)


async def test_stop_tokens_do_not_show_on_the_short_way_either(tokenizer):
    """Also where the tokenizer does not call them special."""
    letter = unpack(tokenizer.encode("x", add_special_tokens=False))[0]
    for stop in (EOS_ID, letter):
        answering = Answering(tokenizer, stops=(stop,))
        sent = await answering.answer([pack([letter + 1]), pack([stop])], [True])
        assert answering.record.output_tokens == 2
        assert b"".join(sent).count(b'"content"') == 2  # the opening, and the first token


def test_only_tokens_with_a_text_are_remembered(tokenizer):
    """A worker that sends ids beyond the vocabulary, or parts of characters, does not fill the memory."""
    spellings = Spellings(tokenizer.bytes_of)
    parts = unpack(tokenizer.encode("\U0001f9ff", add_special_tokens=False))
    for token_id in (tokenizer.vocabulary_size + 1, EOS_ID, *parts):
        assert spellings[pack([token_id])] == b""
    assert not spellings
    [letter] = unpack(tokenizer.encode('"', add_special_tokens=False))
    assert spellings[pack([letter])] == b'"\\""'
    assert len(spellings) == 1
