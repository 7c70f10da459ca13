"""A vLLM server behind the messages that a node has for its engine.

Each Prefill and each Decode is one request to the server, and a task here. What is to be read or written in the pool
is granted to the connector before the request is sent, and revoked before its end is told: Cancelled, Failed, Finished
and Prefilled all say that nothing touches the attempt's windows any more. vLLM orders the work by itself.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, assert_never

import msgspec
import numpy as np
import structlog

from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Command,
    Decode,
    Event,
    Export,
    ExportFailed,
    Failed,
    Finished,
    Load,
    PoolRead,
    Prefill,
    Prefilled,
    RowsReady,
    ServerLoad,
    SetShare,
    Tokens,
)
from prfaas.engine.vllm.asking import Request, decode_body, granted, prefill_body
from prfaas.engine.vllm.bridge import Begun, Grant, Loaded, News, Saved, Wrote
from prfaas.engine.vllm.completions import Address, Choice, ServerError, Usage, answered, complete
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.others import Others
from prfaas.engine.vllm.own_network import GIVE, taken
from prfaas.engine.vllm.scores import scores, top_logits
from prfaas.engine.vllm.server import SERVED_NAME
from prfaas.engine.vllm.shelf import Shelf
from prfaas.engine.vllm.wish import Wish
from prfaas.engine.vllm.work import Work
from prfaas.errors import PeerUnavailable
from prfaas.kvcache.layout import Window
from prfaas.request import TOKEN_BYTES, FinishReason

#: How an answer ends that is whole, in the server's words; otherwise it was broken off.
ENDINGS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

log = structlog.get_logger()


class Adapter:
    """`handle` and `heard` are called on the event loop, and never wait."""

    def __init__(self, api: Address, pool_bytes: int, emit: Callable[[Event], None], served: str = SERVED_NAME) -> None:
        """`served`: the server's name for its model."""
        self._api, self._pool_bytes, self._emit, self._served = api, pool_bytes, emit, served
        self._bridge: Bridge | None = None
        # As large as the pool: a node takes on no more than its pool could hold.
        self._shelf, self._kept = Shelf(pool_bytes), dict[str, Window]()
        self._requests: dict[str, Request] = {}
        self._work = Work()
        self._endings: set[asyncio.Task[None]] = set()
        self._others = Others()

    def connect(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def handle(self, command: Command) -> None:
        match command:
            case Prefill(hand_over=True):
                self._start(command, self._hand_over)
            case Prefill():
                self._start(command, self._prefill)
            case Decode():
                self._start(command, self._decode)
            case Export():
                self._emit(ExportFailed(command.attempt, "vLLM keeps no sequence beyond its request"))
            case Cancel():
                self._end(command.attempt, Cancelled(command.attempt))
            case SetShare():
                pass
            case _:
                assert_never(command)

    def heard(self, news: News) -> None:
        """What the connector says, also of attempts that are no more."""
        request = self._requests.get(getattr(news, "attempt", ""))
        if request is None:
            return
        match news:
            case Begun():
                request.begun = news
                # Nothing is loaded after that, also where the server had it all in its own cache.
                self._read(news.attempt, request)
            case Saved():
                request.saved = news
            case Loaded():
                self._read(news.attempt, request)
            case Wrote():
                if isinstance(request.command, Prefill) and request.command.out is not None:
                    self._emit(RowsReady(news.attempt, news.layer, news.stop))
                self._work.prefilled_to(news.attempt, news.stop)

    def _read(self, attempt: str, request: Request) -> None:
        if request.command.held and not request.read:
            request.read = True
            self._emit(PoolRead(attempt))

    def _start(self, command: Prefill | Decode, story: Callable[[Any, Request], Coroutine[Any, Any, None]]) -> None:
        if command.attempt in self._requests:
            self._end(command.attempt, Failed(command.attempt, "the attempt is already in hand"))
            return
        request = self._requests[command.attempt] = Request(command)
        request.task = asyncio.get_running_loop().create_task(self._run(command, request, story))

    async def _run(
        self, command: Any, request: Request, story: Callable[[Any, Request], Coroutine[Any, Any, None]]
    ) -> None:
        """The story, its end told after the grant is revoked. Whatever goes wrong with a request is the end of that
        request alone; where the server itself is gone the node hears of that instead."""
        try:
            await story(command, request)
        except PeerUnavailable:
            pass
        except Exception as error:
            log.warning("request to vLLM failed", attempt=command.attempt, error=str(error))
            self._forget(command.attempt)
            self._put_away(command.attempt)
            self._emit(Failed(command.attempt, f"{type(error).__name__}: {error}"))
        finally:
            self._forget(command.attempt)

    def _forget(self, attempt: str) -> None:
        self._requests.pop(attempt, None)
        self._work.forget(attempt)

    def _end(self, attempt: str, answer: Event) -> None:
        task = asyncio.get_running_loop().create_task(self._ended(attempt, answer))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _ended(self, attempt: str, answer: Event) -> None:
        """The answer comes when the attempt's grant is revoked and it holds nothing."""
        request = self._requests.get(attempt)
        if request is not None and request.task is not None:
            request.task.cancel()
            await asyncio.gather(request.task, return_exceptions=True)
        try:
            # Once more: the task may have been cancelled while it waited for this very answer.
            await self._connected.revoke(attempt)
        except PeerUnavailable:
            return
        self._put_away(attempt)
        self._emit(answer)

    def load(self) -> Load:
        return msgspec.structs.replace(
            self._work.load(len(self._kept)),
            server=self._others.server,
            others_running=self._others.running,
            others_waiting=self._others.waiting,
        )

    @property
    def in_hand(self) -> int:
        """Requests of ours at the server."""
        return len(self._requests)

    def counted(self, server: ServerLoad | None, before: int) -> None:
        """By the server itself, which was asked when `before` requests were in hand."""
        self._others.counted(server, max(before, self.in_hand))

    def _put_away(self, attempt: str) -> None:
        self._kept.pop(attempt, None)
        self._shelf.give_back(attempt)

    def _keep(self, attempt: str, tokens: int) -> Window:
        """Where a sequence waits for its decode."""
        nbytes = self._connected.hello.geometry.layout.window_bytes(tokens, state=True)
        offset = self._shelf.take(attempt, nbytes)
        if offset is None:
            raise ServerError("no room to keep another sequence")
        return Window(0, tokens, self._pool_bytes + offset, state=True)

    async def _prefill(self, command: Prefill, request: Request) -> None:
        started_s = time.monotonic()
        if command.stop == 0:
            self._forget(command.attempt)
            self._emit(Prefilled(attempt=command.attempt, tokens=0, started_s=started_s, ended_s=started_s))
            return
        resume, out = command.resume_tokens, command.out or self._keep(command.attempt, command.stop)
        ends = tuple(end for end in (resume, *command.ends) if end > out.first)
        grant = Grant(command.attempt, command.held, resume, out, ends)
        self._work.prefill(command.attempt, resume, command.stop)
        wish = Wish(command.attempt, load=resume, save=True)
        body = prefill_body(self._served, command, command.stop, wish)
        async with granted(self._connected, grant):
            async for _ in self._choices(request, body):
                pass
        begun, saved = request.begun, request.saved
        if begun is None or saved is None:
            raise ServerError("the request ended before its prompt was computed")
        self._forget(command.attempt)
        if command.out is None:
            self._kept[command.attempt] = out
        self._emit(
            Prefilled(
                attempt=command.attempt,
                tokens=command.stop - begun.computed,
                started_s=begun.at_s,
                ended_s=saved.at_s,
                cached=max(0, request.cached(begun) - resume),
            )
        )

    async def _hand_over(self, command: Prefill, request: Request) -> None:
        """The whole prompt: how much of it has to be there for the last token is between the two servers."""
        resume, attempt = command.resume_tokens, command.attempt
        self._work.prefill(attempt, resume, command.stop)
        whole, wish = len(command.prompt) // TOKEN_BYTES, Wish(attempt, load=resume)
        body = prefill_body(self._served, command, whole, wish, GIVE)
        async with granted(self._connected, Grant(attempt, command.held, resume)):
            handover = taken(await answered(self._api, body))
        begun, ended_s = request.begun, time.monotonic()
        if begun is None:
            raise ServerError("the request ended before its prompt was computed")
        self._work.prefilled_to(attempt, command.stop)
        self._forget(attempt)
        self._emit(
            Prefilled(
                attempt=attempt,
                tokens=max(0, command.stop - begun.computed),
                started_s=begun.at_s,
                ended_s=ended_s,
                cached=max(0, begun.computed - resume),
                handover=handover,
            )
        )

    async def _decode(self, command: Decode, request: Request) -> None:
        prompt_tokens = len(command.prompt) // TOKEN_BYTES
        kept = self._kept.get(command.attempt)
        held = command.held or ((kept,) if kept is not None else ())
        if command.tokens and not held and not command.handover:
            raise ServerError("no sequence was kept")
        load = 0 if command.handover else command.tokens
        body = decode_body(self._served, command, load)
        self._work.decode(command.attempt)
        drawn, ending = 0, None
        async with granted(self._connected, Grant(command.attempt, held, load)):
            async for choice in self._choices(request, body):
                tokens = list(choice.token_ids or ())
                ending = choice.finish_reason or ending
                if ending == "stop":
                    tokens = tokens[:-1] if tokens and tokens[-1] in command.stop_token_ids else tokens
                if tokens:
                    self._drawn(command, request, tokens, choice, first=drawn == 0)
                    drawn += len(tokens)
        if ending not in ENDINGS:
            raise ServerError(f"the answer ended by {ending}")
        self._put_away(command.attempt)
        computed = request.begun.computed if request.begun is not None else 0
        self._work.recomputed(prompt_tokens - computed)
        self._forget(command.attempt)
        self._emit(
            Finished(
                attempt=command.attempt,
                reason=ENDINGS[ending].value,
                recomputed_tokens=prompt_tokens - computed,
                output_tokens=drawn,
                kept_tokens=prompt_tokens + max(0, drawn - 1),
            )
        )

    async def _choices(self, request: Request, body: dict[str, Any]) -> AsyncIterator[Choice]:
        async for each in complete(self._api, body):
            if isinstance(each, Usage):
                request.usage = each
            else:
                yield each

    def _drawn(self, command: Decode, request: Request, tokens: list[int], choice: Choice, *, first: bool) -> None:
        self._work.drawn(command.attempt, len(tokens))
        said = choice.logprobs
        self._emit(
            Tokens(
                attempt=command.attempt,
                tokens=np.array(tokens, "<u4").tobytes(),
                top_logits=() if said is None else top_logits(said, len(tokens), command.top_logits),
                scores=() if said is None else scores(said, len(tokens)),
                started_s=request.begun.at_s if first and request.begun is not None else None,
            )
        )

    @property
    def _connected(self) -> Bridge:
        assert self._bridge is not None, "the node hears Ready after the connector is there"
        return self._bridge
