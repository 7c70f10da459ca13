"""Who may call what on a server with certificates, and a count of those that may not.

TLS lets in whoever has a certificate of our authority; here the certificate's role decides, call by call. gRPC turns
connections without an acceptable certificate away by itself and tells nobody. It does tell of each connection that
begins: one on which no call follows within a while is taken for one that was turned away.
"""

import asyncio
import inspect
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
import structlog

from prfaas.security import PeerRole, Refusal, roles_in

#: From the first packet of a connection to its first call.
FIRST_CALL_S = 5.0
#: Connections that are remembered as those of peers with a certificate, the latest ones.
MAX_PEERS = 4096
#: Beginnings that wait for their first call. Of a flood the oldest are counted early.
MAX_WAITING = 4096

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Context], Any]

log = structlog.get_logger()


class Gate(grpc.aio.ServerInterceptor):
    """`callers` are the roles that may call a method, by its full name; the other methods are for every role of ours.
    Belongs to one event loop; `begun` alone is called from other threads."""

    def __init__(self, callers: Mapping[str, frozenset[PeerRole]], first_call_s: float = FIRST_CALL_S) -> None:
        self._callers, self._first_call_s = callers, first_call_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[float] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._untold = 0
        self.refused = dict.fromkeys(Refusal, 0)

    def begun(self) -> None:
        """A connection begins; whose it is will be seen."""
        try:
            self._loop.call_soon_threadsafe(self._await_first_call)
        except RuntimeError:
            pass  # the loop has ended, and with it the server

    async def intercept_service(
        self, continuation: "Callable[[Any], Awaitable[Handler | None]]", details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(details)
        if handler is None:
            return None
        allowed = self._callers.get(details.method, frozenset(PeerRole))

        async def check(context: Context) -> None:
            await self._check(context, details.method, allowed)

        return _guarded(handler, check)

    async def _check(self, context: Context, method: str, allowed: frozenset[PeerRole]) -> None:
        self._called(context.peer())
        names = context.auth_context().get("x509_subject_alternative_name", ())
        roles = roles_in(name.decode("utf-8", "replace") for name in names)
        if roles & allowed:
            return
        self.refused[Refusal.ROLE] += 1
        shown = ", ".join(role.value for role in PeerRole if role in roles) or "no role"
        log.warning("refused a call", method=method, peer=context.peer(), certificate=shown)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method} is not for a certificate of {shown}")

    def _called(self, peer: str) -> None:
        """The first call of a connection settles one of those that have begun: they are alike."""
        if peer not in self._known and self._waiting:
            self._waiting.popleft()
        self._known[peer] = None
        self._known.move_to_end(peer)
        if len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def _await_first_call(self) -> None:
        self._waiting.append(self._loop.time() + self._first_call_s)
        if len(self._waiting) > MAX_WAITING:
            self._give_up()
        if self._timer is None:
            self._timer = self._loop.call_later(self._first_call_s, self._expire)

    def _expire(self) -> None:
        """Once per such time at most, so that a flood of connections is none of lines in the log."""
        while self._waiting and self._waiting[0] <= self._loop.time():
            self._give_up()
        if self._untold:
            log.warning("connections without an acceptable certificate", count=self._untold)
            self._untold = 0
        self._timer = self._loop.call_later(self._first_call_s, self._expire) if self._waiting else None

    def _give_up(self) -> None:
        self._waiting.popleft()
        self.refused[Refusal.HANDSHAKE] += 1
        self._untold += 1


def _guarded(handler: Handler, check: Callable[[Context], Awaitable[None]]) -> Handler:
    """The same handler, each call of it checked first."""
    behaviour: Any
    make: Any
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            behaviour, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        case False, True:
            behaviour, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        case True, False:
            behaviour, make = handler.stream_unary, grpc.stream_unary_rpc_method_handler
        case _:
            behaviour, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    guarded: Handler = make(_checked(behaviour, check), handler.request_deserializer, handler.response_serializer)
    return guarded


def _checked(behaviour: Behaviour, check: Callable[[Context], Awaitable[None]]) -> Behaviour:
    """gRPC tells generators from coroutines that write, so what comes out is of the kind that went in."""
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: Context) -> Any:
            await check(context)
            async for answer in behaviour(request, context):
                yield answer

        return generate

    async def call(request: Any, context: Context) -> Any:
        await check(context)
        return await behaviour(request, context)

    return call
