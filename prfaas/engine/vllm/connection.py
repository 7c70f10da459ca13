"""The engine process's end of the bridge to the connector in its vLLM server."""

import array
import asyncio
import socket
from collections.abc import Callable, Sequence

import msgspec

from prfaas.engine.vllm.bridge import Grant, Granted, Hello, News, Refused, Revoke, Revoked
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.ipc import AsyncChannel

PEER = "connector in the vLLM server"


class Bridge:
    """`grant` and `revoke` return when the connector has answered, and raise PeerUnavailable when it no longer can:
    nobody waits for a server that is gone. What else it says goes to `heard`."""

    def __init__(self, hello: Hello, channel: AsyncChannel[News], heard: Callable[[News], None]) -> None:
        self.hello, self._channel, self._heard = hello, channel, heard
        self._grants: dict[str, asyncio.Future[None]] = {}
        self._revokes: dict[str, asyncio.Future[None]] = {}
        self._ended = False

    @classmethod
    async def accept(cls, listener: socket.socket, memory: Sequence[int], heard: Callable[[News], None]) -> "Bridge":
        """Wait for the connector, and give it the memory: descriptors. Raises PeerUnavailable, and
        ConfigError for a server that it does not serve."""
        loop = asyncio.get_running_loop()
        ours, _ = await loop.sock_accept(listener)
        channel = await AsyncChannel[News].over(ours, News)
        try:
            hello = await channel.receive()
        except msgspec.MsgspecError as error:
            raise PeerUnavailable(PEER, f"it is of another version than this worker: {error}") from error
        if isinstance(hello, Refused):
            raise ConfigError(hello.setting, hello.why)
        if not isinstance(hello, Hello):
            raise PeerUnavailable(PEER, "it did not say what it is")
        duplicate = ours.dup()
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", memory))]
            duplicate.sendmsg([b"\0"], rights)
        finally:
            duplicate.close()
        return cls(hello, channel, heard)

    async def grant(self, grant: Grant) -> None:
        await self._answered(self._grants, grant.attempt, grant)

    async def revoke(self, attempt: str) -> None:
        """When this returns, the server touches the pool for the attempt no more."""
        await self._answered(self._revokes, attempt, Revoke(attempt))

    async def run(self) -> None:
        """Raises PeerUnavailable when the connector is gone."""
        try:
            while (news := await self._channel.receive()) is not None:
                match news:
                    case Granted():
                        _settle(self._grants.pop(news.attempt, None))
                    case Revoked():
                        _settle(self._revokes.pop(news.attempt, None))
                    case _:
                        self._heard(news)
        finally:
            self._ended = True
            for future in (*self._grants.values(), *self._revokes.values()):
                _settle(future, _gone())
        raise _gone()

    async def _answered(self, waiting: dict[str, asyncio.Future[None]], attempt: str, order: Grant | Revoke) -> None:
        if self._ended:
            raise _gone()
        future = waiting.get(attempt)
        if future is None:
            future = waiting[attempt] = asyncio.get_running_loop().create_future()
            self._channel.send(order)
        await asyncio.shield(future)


def _gone() -> PeerUnavailable:
    return PeerUnavailable(PEER, "its process ended")


def _settle(future: asyncio.Future[None] | None, error: PeerUnavailable | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more
