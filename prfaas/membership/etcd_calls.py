"""How etcd is called: which endpoint, how long, how often again, and as whom.

A call is made of attempts of one second. An attempt that finds the endpoint unavailable moves on to the next
endpoint; one that finds the login expired logs in again; anything else the server says is final and raises `Refused`.
Only what may be repeated is called so. When the budget is spent the call raises `PeerUnavailable`.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from prfaas.errors import PeerUnavailable
from prfaas.rpc.v1 import etcd_pb2 as pb

ATTEMPT_S = 1.0
CALL_S = 5.0

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# etcd takes a ping every 5 s while a stream is open, and hangs up on pings without one. Without the third line gRPC
# itself stops to ping after two pings without data, and a quiet watch would again not notice that its peer is gone.
# Without the fourth a keepalive ping that waits behind one of gRPC's own bandwidth probes waits for that one's minute.
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 13_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
]

#: What the server itself answers, and would answer again.
_FINAL = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: whom to trust, and who we are where the server asks for it."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        cert = self.cert.read_bytes() if self.cert else None
        key = self.key.read_bytes() if self.key else None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), key, cert)


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str


class Refused(PeerUnavailable):
    """The server answered, and the answer is an error that another attempt will not change."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__("store", f"{code.name}: {detail}")
        self.code = code


def pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt: doubling to one second, and jittered so that clients spread."""
    ceiling_s = 0.05
    while True:
        yield ceiling_s * random.uniform(0.5, 1.0)
        ceiling_s = min(1.0, 2 * ceiling_s)


class EtcdCalls:
    """Channels open on first use, one per endpoint, and reconnect by themselves; `_current` says which one to use."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None, login: Login | None) -> None:
        assert endpoints, "at least one endpoint"
        self._endpoints = tuple(endpoints)
        self._credentials = tls.credentials() if tls else None
        self._login = login
        self._token: str | None = None
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._current = 0

    async def call(self, path: str, request: Message, reply: type[M], attempt_s: float = ATTEMPT_S) -> M:
        return (await self.attempts(lambda: self.unary(path, request, reply, attempt_s)))[0]

    async def attempts(self, attempt: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """The answer, and how many attempts it took: more than one and an earlier one may have had its effect as
        well."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CALL_S
        for count, pause_s in enumerate(pauses(), start=1):
            try:
                return await attempt(), count
            except Refused:
                raise
            except PeerUnavailable:
                if loop.time() + pause_s >= deadline:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses never end")

    async def unary(self, path: str, request: Message, reply: type[M], attempt_s: float = ATTEMPT_S) -> M:
        """One attempt."""
        with self._endpoint() as index:
            metadata = await self._metadata(index)
            return await self._unary(index, path, request, reply, attempt_s, metadata)

    async def stream(self, path: str, request: Message, reply: type[M]) -> AsyncGenerator[M, None]:
        """What is answered to one request on a stream of its own, until it breaks: PeerUnavailable. The first answer is
        due within an attempt, the others come when they come."""
        with self._endpoint() as index:
            metadata = await self._metadata(index)
            call = self._channel(index).stream_stream(path, _serialized, reply.FromString)(metadata=metadata)
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await call.write(request)
                    answer = await call.read()
                while isinstance(answer, reply):
                    yield answer
                    answer = await call.read()
            finally:
                call.cancel()
            raise PeerUnavailable("store", f"{self._endpoints[index]} ended the stream")

    def forget_login(self) -> None:
        self._token = None

    @contextmanager
    def _endpoint(self) -> Iterator[int]:
        """Which endpoint to use now. A failure in the block becomes ours, and what the next attempt needs is
        changed."""
        index = self._current
        try:
            yield index
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, index) from error
        except TimeoutError as error:
            self._rotate(index)
            raise PeerUnavailable("store", f"{self._endpoints[index]} did not answer in time") from error

    def _translated(self, error: grpc.aio.AioRpcError, index: int) -> PeerUnavailable:
        code, detail = error.code(), error.details() or ""
        match code:
            case grpc.StatusCode.UNAUTHENTICATED:
                self.forget_login()
            # Users or roles have changed since the token was given.
            case grpc.StatusCode.INVALID_ARGUMENT if "revision of auth store is old" in detail:
                self.forget_login()
            case _ if code in _FINAL:
                return Refused(code, detail)
            # Unavailable, too slow, or a stream torn in one of the ways that gRPC has words for.
            case _:
                self._rotate(index)
        return PeerUnavailable("store", f"{self._endpoints[index]} {code.name}: {detail}")

    def _rotate(self, failed: int) -> None:
        # Several calls fail together when an endpoint goes; only the first of them moves on.
        if failed == self._current:
            self._current = (failed + 1) % len(self._endpoints)

    def _channel(self, index: int) -> grpc.aio.Channel:
        if index not in self._channels:
            target = self._endpoints[index]
            self._channels[index] = (
                grpc.aio.secure_channel(target, self._credentials, _CHANNEL_OPTIONS)
                if self._credentials
                else grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS)
            )
        return self._channels[index]

    async def _metadata(self, index: int) -> Metadata:
        """`hasleader` makes a member that is cut off from its cluster say so, instead of staying silent for ever."""
        if self._login is not None and self._token is None:
            request = pb.AuthenticateRequest(name=self._login.user, password=self._login.password)
            path = "/etcdserverpb.Auth/Authenticate"
            self._token = (await self._unary(index, path, request, pb.AuthenticateResponse, ATTEMPT_S, ())).token
        return (("hasleader", "true"), *((("token", self._token),) if self._token else ()))

    async def _unary(
        self, index: int, path: str, request: Message, reply: type[M], timeout_s: float, metadata: Metadata
    ) -> M:
        method = self._channel(index).unary_unary(path, _serialized, reply.FromString)
        answer: M = await method(request, timeout=timeout_s, metadata=metadata)
        return answer

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
