"""The node's end of its engine process: commands out, events back to whoever waits for that attempt."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from prfaas.engine import messages
from prfaas.engine.port import EngineInfo
from prfaas.errors import EngineFailed, PeerUnavailable
from prfaas.ipc import AsyncChannel
from prfaas.node.answers import Pulse, answered
from prfaas.request import AttemptId, Sampling

_IDLE = messages.Load(
    queued_prefill_tokens=0,
    queued_sequences=0,
    active_sequences=0,
    kept_sequences=0,
    prefill_tokens_total=0,
    decode_forwarded_tokens_total=0,
    prefill_busy_s_total=0.0,
    decode_busy_s_total=0.0,
)

#: An engine that does not confirm a cancellation within this time is stuck in one operator: the worker then restarts.
CANCEL_DEADLINE_S = 60.0


class EngineClient:
    """One command at a time per attempt. Queues are bounded by the tokens that the attempt was admitted with."""

    def __init__(self, node: str, channel: AsyncChannel[messages.Event]) -> None:
        self._node, self._channel = node, channel
        self._waiting: dict[str, asyncio.Queue[messages.Event]] = {}
        self._cancels: dict[str, asyncio.Future[None]] = {}
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.load = _IDLE
        #: The engine speaks about four times a second, but not while it is in one operator.
        self.pulse = Pulse(f"engine of {node}")
        #: 0 until they were set.
        self.max_batch, self.prefill_share = 0, 0.0

    def set_share(self, prefill_share: float, max_batch: int) -> None:
        """How the engine divides its time, and how many sequences it advances together."""
        self.max_batch, self.prefill_share = max_batch, prefill_share
        self._channel.send(messages.SetShare(prefill_share=prefill_share, max_batch=max_batch))

    async def info(self) -> EngineInfo:
        """What the engine is, once it has loaded its model."""
        return await asyncio.shield(self._info)

    async def run(self) -> None:
        """Deliver events until the engine is gone; then raise PeerUnavailable."""
        while (event := await self._channel.receive()) is not None:
            self.pulse.beat()
            match event:
                case messages.Ready():
                    self._info.set_result(event.info)
                case messages.Load():
                    self.load = event
                case messages.Cancelled():
                    if future := self._cancels.pop(event.attempt, None):
                        future.set_result(None)
                case _:
                    if queue := self._waiting.get(event.attempt):
                        queue.put_nowait(event)
        raise PeerUnavailable(f"engine of {self._node}", "its process ended")

    async def prefill(
        self,
        attempt: AttemptId,
        prompt: bytes,
        stop: int,
        span: int | None,
        on_parts: Callable[[tuple[int, ...]], None],
    ) -> messages.Prefilled:
        """Compute tokens 0:stop; `on_parts` is called as parts come to exist in the span."""
        return await self._prefill(
            messages.Prefill(attempt=attempt, prompt=prompt, stop=stop, span=span), on_parts, _ignore
        )

    async def take_up(
        self, attempt: AttemptId, prompt: bytes, stop: int, held: int, span: int, on_read: Callable[[], None]
    ) -> messages.Prefilled:
        """Compute tokens held:stop of a sequence that stays in the engine; the first ones are read from the span, and
        `on_read` is called when that has been done."""
        command = messages.Prefill(attempt=attempt, prompt=prompt, stop=stop, held=held, held_span=span)
        return await self._prefill(command, _ignore, on_read)

    async def _prefill(
        self, command: messages.Prefill, on_parts: Callable[[tuple[int, ...]], None], on_read: Callable[[], None]
    ) -> messages.Prefilled:
        with self._ordered(command) as events:
            while True:
                match await events.get():
                    case messages.PartsReady(parts=parts):
                        on_parts(parts)
                    case messages.PoolRead():
                        on_read()
                    case messages.Prefilled() as done:
                        return done
                    case messages.Failed(detail=detail):
                        raise EngineFailed(self._node, detail)

    async def decode(
        self, attempt: AttemptId, prompt: bytes, tokens: int, sampling: Sampling, span: int | None, top_logits: int
    ) -> AsyncIterator[messages.PoolRead | messages.Tokens | messages.Finished]:
        """Tokens until Finished. `span` and `tokens` as in messages.Decode."""
        command = messages.Decode(
            attempt=attempt,
            prompt=prompt,
            tokens=tokens,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            span=span,
            top_logits=top_logits,
        )
        with self._ordered(command) as events:
            while True:
                match await events.get():
                    case messages.PoolRead() | messages.Tokens() as event:
                        yield event
                    case messages.Finished() as event:
                        yield event
                        return
                    case messages.Failed(detail=detail):
                        raise EngineFailed(self._node, detail)

    async def cancel(self, attempt: AttemptId) -> None:
        """Make the engine forget the attempt; when this returns it no longer touches the attempt's span."""
        future = self._cancels.get(attempt)
        if future is None:
            future = self._cancels[attempt] = asyncio.get_running_loop().create_future()
            self._channel.send(messages.Cancel(attempt))
        await answered(f"engine of {self._node}", CANCEL_DEADLINE_S, asyncio.shield(future))

    @contextmanager
    def _ordered(self, command: messages.Prefill | messages.Decode) -> Iterator[asyncio.Queue[messages.Event]]:
        """Send the command and collect the attempt's events meanwhile."""
        assert command.attempt not in self._waiting, "one command at a time per attempt"
        queue = self._waiting[command.attempt] = asyncio.Queue()
        try:
            self._channel.send(command)
            yield queue
        finally:
            del self._waiting[command.attempt]


def _ignore(*_: object) -> None:
    """What does not come, or does not matter."""
