"""The node's end of its engine process: commands out, events back to whoever waits for that attempt."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from prfaas.engine import messages
from prfaas.engine.port import EngineInfo
from prfaas.errors import ConfigError, EngineFailed, PeerUnavailable
from prfaas.ipc import AsyncChannel
from prfaas.kvcache.layout import Window
from prfaas.node.answers import Pulse, answered
from prfaas.node.engine_prefixes import EnginePrefixes
from prfaas.node.engine_pulse import Labour
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
#: An export waits for the turn under way and for those of other attempts.
EXPORT_DEADLINE_S = 60.0


def _ignore(*_: object) -> None:
    """What does not come, or does not matter."""


class EngineClient:
    """One command at a time per attempt. Queues are bounded by the tokens that the attempt was admitted with."""

    def __init__(self, node: str, channel: AsyncChannel[messages.Event]) -> None:
        self._node, self._channel = node, channel
        self._waiting: dict[str, asyncio.Queue[messages.Event]] = {}
        self._cancels: dict[str, asyncio.Future[None]] = {}
        self._exports: dict[str, asyncio.Future[None]] = {}
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.load = _IDLE
        self.prefixes = EnginePrefixes()
        #: The engine speaks about four times a second, but not while it is in one operator.
        self.pulse = Pulse(f"engine of {node}")
        #: It may go on speaking and still do nothing.
        self.progress, self._labour = Pulse(f"engine of {node}", "it has work and does none of it"), Labour()
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
        """Deliver events until the engine is gone; then raise PeerUnavailable, or ConfigError when it says why."""
        while (event := await self._channel.receive()) is not None:
            self.pulse.beat()
            match event:
                case messages.Ready():
                    self._info.set_result(event.info)
                case messages.Unfit(setting=setting, why=why):
                    raise ConfigError(setting, why)
                case messages.Load():
                    self.load = event
                    if self._labour.beats(event):
                        self.progress.beat()
                case messages.Prefixes(changes=changes):
                    self.prefixes.apply(changes)
                case messages.Cancelled():
                    _settle(self._cancels.pop(event.attempt, None))
                    _settle(self._exports.pop(event.attempt, None), EngineFailed(self._node, "cancelled"))
                case messages.Exported():
                    _settle(self._exports.pop(event.attempt, None))
                case messages.ExportFailed(detail=detail):
                    _settle(self._exports.pop(event.attempt, None), EngineFailed(self._node, detail))
                case _:
                    if queue := self._waiting.get(event.attempt):
                        queue.put_nowait(event)
        raise PeerUnavailable(f"engine of {self._node}", "its process ended")

    async def prefill(
        self,
        attempt: AttemptId,
        prompt: bytes,
        stop: int,
        ends: tuple[int, ...],
        *,
        held: tuple[Window, ...] = (),
        held_tokens: int | None = None,
        out: Window | None = None,
        checkpoints: tuple[int, ...] = (),
        linger: bool = False,
        salt: bytes = b"",
        hand_over: bool = False,
        on_rows: Callable[[int, int], None] = _ignore,
        on_read: Callable[[], None] = _ignore,
    ) -> messages.Prefilled:
        """Compute the prompt up to `stop`, as in messages.Prefill. `on_rows(layer, stop)` is called as rows come to
        exist in `out`, `on_read()` once `held` is no longer needed. Raises EngineFailed."""
        command = messages.Prefill(
            attempt=attempt,
            prompt=prompt,
            stop=stop,
            ends=ends,
            held=held,
            held_tokens=held_tokens,
            out=out,
            checkpoints=checkpoints,
            linger=linger,
            salt=salt,
            hand_over=hand_over,
        )
        with self._ordered(command) as events:
            while True:
                match await events.get():
                    case messages.RowsReady() as ready:
                        on_rows(ready.layer, ready.stop)
                    case messages.PoolRead():
                        on_read()
                    case messages.Prefilled() as done:
                        return done
                    case messages.Failed(detail=detail):
                        raise EngineFailed(self._node, detail)

    async def decode(
        self,
        attempt: AttemptId,
        prompt: bytes,
        tokens: int,
        sampling: Sampling,
        held: tuple[Window, ...],
        top_logits: int,
        *,
        snapshot_tokens: int = 0,
        linger: bool = False,
        salt: bytes = b"",
        handover: bytes = b"",
    ) -> AsyncIterator[messages.PoolRead | messages.Tokens | messages.Finished]:
        """Tokens until Finished, as in messages.Decode. Raises EngineFailed."""
        command = messages.Decode(
            attempt=attempt,
            prompt=prompt,
            tokens=tokens,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            constraint=sampling.constraint,
            held=held,
            top_logits=top_logits,
            snapshot_tokens=snapshot_tokens,
            linger=linger,
            salt=salt,
            handover=handover,
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

    async def export(self, attempt: AttemptId, windows: tuple[Window, ...]) -> None:
        """Write what the attempt has computed, and its snapshots, into these windows; beside any other command of the
        attempt, one export at a time. Raises EngineFailed. Whoever is cancelled here must cancel the attempt before the
        windows are used for anything else."""
        assert attempt not in self._exports, "one export at a time per attempt"
        future = self._exports[attempt] = asyncio.get_running_loop().create_future()
        self._channel.send(messages.Export(attempt, windows))
        await answered(f"engine of {self._node}", EXPORT_DEADLINE_S, asyncio.shield(future))

    async def cancel(self, attempt: AttemptId) -> None:
        """Make the engine forget the attempt; when this returns it no longer touches the attempt's windows."""
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


def _settle(future: asyncio.Future[None] | None, error: EngineFailed | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more
