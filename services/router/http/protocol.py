"""One client connection.

Requests are answered one after the other by a task that lives only while there is something to answer. Reading never
pauses, so that a client that leaves is noticed at once; what may be sent ahead is bounded, and beyond that refused. The
end of the client's stream looks the same as a closed socket: what can be answered at once is answered, the rest is
cancelled, for work for nobody is worse than a client that closes half and waits.

What must hold: responses come in the order of their requests; a client that leaves cancels the handler; every wait (for
a request, its parts, the reader, the close) ends by a limit.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, cast

import structlog

from services.router.http.errors import error_response
from services.router.http.limits import Limits
from services.router.http.messages import ByHead, Handle, HttpRequest, Response, StreamingResponse
from services.router.http.parser import Continue, Item, Phase, RequestParser
from services.router.http.writer import ResponseWriter, SlowReader

log = structlog.get_logger(__name__)

#: How long a client that has ended its stream is taken to be waiting for answers.
HALF_CLOSED_S = 0.1
#: How long one that has connected to a server which is to stop may take to begin its request.
FIRST_WORD_S = 0.2


class Owner(Protocol):
    """Keeps count of connections. `opened` may turn one away; `gone` comes once its socket is closed and its handler
    has ended. Room is for bytes of bodies, which all connections share."""

    def opened(self, connection: "Connection") -> Response | None: ...

    def gone(self, connection: "Connection") -> None: ...

    def take_room(self, size: int) -> bool: ...

    def give_room(self, size: int) -> None: ...

    def refused(self, status: int) -> None: ...


class Connection(asyncio.Protocol):
    """What the event loop and the server call. It has slots, for there are thousands of them."""

    __slots__ = (
        "_answering",
        "_closed",
        "_closing",
        "_ended",
        "_finishing",
        "_handle",
        "_held_bytes",
        "_left",
        "_limits",
        "_loop",
        "_owes_continue",
        "_owner",
        "_parser",
        "_timed",
        "_timer",
        "_transport",
        "_waiting",
        "_writer",
    )

    def __init__(
        self,
        owner: Owner,
        handle: Handle,
        limits: Limits,
        now: Callable[[], float],
        by_head: ByHead = lambda head: False,
    ) -> None:
        self._owner, self._handle, self._limits = owner, handle, limits
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(limits, now, self._take_room, by_head)
        #: A list, for it is short and mostly empty, and a deque is never small.
        self._waiting: list[HttpRequest | Response] = []
        self._answering: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: What the timer runs for: the parser's phase and the number of the request.
        self._timed: tuple[Phase, int] | None = None
        #: Of the owner's room for bodies.
        self._held_bytes = 0
        self._owes_continue = False
        self._finishing = False
        #: The client sends nothing more.
        self._ended = False
        #: Nobody is there to answer. `_closed`: the socket is gone as well.
        self._left = self._closed = False
        #: Nothing more is sent; the client may still read.
        self._closing = False

    # Called by the server.

    def finish(self) -> None:
        """Take no request after those that have begun. A client that has said nothing yet gets a moment to."""
        self._finishing = True
        if self._answering is None and self._parser.phase is Phase.IDLE:
            if self._parser.begun:
                self._close()
            else:
                self._start_timer(FIRST_WORD_S, self._close)

    def abort(self) -> None:
        """End now, whatever is going on."""
        self._transport.abort()
        self._leave()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writer = ResponseWriter(self._transport, self._limits.write_timeout_s)
        # Without this a token may wait 40 ms for the acknowledgement of the one before.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (refusal := self._owner.opened(self)) is not None:
            self._refuse(refusal)
        self._time_reading()

    def data_received(self, data: bytes) -> None:
        """After a refusal what comes is read and dropped, or the kernel would reset what the client has yet to read."""
        if not self._left and self._parser.phase is not Phase.OVER:
            self._take(self._parser.feed(data, room=self._limits.max_pipelined - len(self._waiting)))
            self._bound_waiting()
            self._time_reading()

    def eof_received(self) -> bool:
        if self._answering is None:
            self._limit_closing()
            return False  # the transport closes itself
        if not self._transport.can_write_eof():  # TLS, which cannot be half-closed
            self.abort()
            return False
        self._ended = True
        self._parser.stop()
        self._start_timer(HALF_CLOSED_S, self.abort)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._leave()
        self._closed = True
        if self._answering is None:
            self._gone()

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    # Requests in.

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            self._owes_continue = isinstance(item, Continue)
            if not isinstance(item, Continue):
                self._waiting.append(item)
        self._go_on()

    def _bound_waiting(self) -> None:
        if len(self._waiting) > 1 and sum(len(item.body) for item in self._waiting) > self._limits.max_body_bytes:
            self._waiting.pop()
            self._refuse(error_response(503, "Too much sent ahead on one connection"))

    def _refuse(self, response: Response) -> None:
        """Answer what came so far, then this, then close."""
        self._parser.stop()
        self._take([response])

    def _go_on(self) -> None:
        """Do what is due next, unless an answer is under way: answer, or let the client send its body."""
        if self._answering is not None:
            return
        if self._waiting:
            self._answering = self._loop.create_task(self._answer_all(), name="http-answer")
            self._answering.add_done_callback(self._answered)
        elif self._owes_continue:
            self._owes_continue = False
            self._writer.go_ahead()

    # Responses out.

    async def _answer_all(self) -> None:
        while self._waiting:
            if isinstance(self._waiting[0], Response):
                self._send_refusal(self._waiting[0])  # and forget the rest
            else:
                await self._answer_first()

    def _send_refusal(self, refusal: Response) -> None:
        self._owner.refused(refusal.status)
        self._writer.refuse(refusal)
        self._close()

    async def _answer_first(self) -> None:
        request = self._waiting.pop(0)
        assert isinstance(request, HttpRequest)
        response = await self._response(request)
        self._give_room(len(request.body))
        keep_alive = request.keep_alive and not self._ending()
        if isinstance(response, StreamingResponse):
            if request.body:
                request = replace(request, body=b"")  # the stream may go on for long
            keep_alive &= not request.http_10  # only the close can tell such a client where the body ends
        await self._writer.send(request, response, keep_alive=keep_alive)
        if not keep_alive or self._ending():
            self._close()

    async def _response(self, request: HttpRequest) -> Response | StreamingResponse:
        try:
            return await self._handle(request)
        except Exception:
            log.exception("http_handler_failed", method=request.method, path=request.path)
            return error_response(500, "Internal error")

    def _ending(self) -> bool:
        """No request will follow: the client has ended its stream, or the server is to stop."""
        if self._waiting:
            return False
        return self._parser.phase is Phase.OVER or (self._finishing and self._parser.phase is Phase.IDLE)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering = None
        if task.cancelled():
            self.abort()
        elif (error := task.exception()) is not None:  # cut off: the client must not take what it has for the whole
            log.warning("http_answer_cut_off", exc_info=None if isinstance(error, SlowReader) else error)
            self.abort()
        if self._closed:
            self._gone()
        elif (self._ended or self._finishing) and self._ending():
            self._close()
        elif not self._left:
            self._go_on()
            self._time_reading()

    # Room for bodies.

    def _take_room(self, size: int) -> bool:
        taken = self._owner.take_room(size)
        self._held_bytes += size if taken else 0
        return taken

    def _give_room(self, size: int) -> None:
        self._held_bytes -= size
        self._owner.give_room(size)

    # The end, and the one timer.

    def _gone(self) -> None:
        self._give_room(self._held_bytes)
        self._owner.gone(self)

    def _leave(self) -> None:
        """The client is gone. Cancels the handler once only: a second time would interrupt its clean-up."""
        if not self._left and self._answering is not None:
            self._answering.cancel()
        self._left = True
        self._parser.stop()  # what has come of a body must not stay until a collection finds it
        self._waiting.clear()

    def _close(self) -> None:
        """Let the client read its last response, then go: half-close, read on until it closes, but not for long."""
        self._parser.stop()
        self._waiting.clear()
        self._owes_continue = False
        if self._left or self._closing or self._transport.is_closing():
            return
        self._closing = True
        if self._transport.can_write_eof() and not self._ended:
            try:
                self._transport.write_eof()
            except OSError:  # the client is gone already
                self._transport.abort()
        else:
            self._transport.close()
        self._limit_closing()

    def _limit_closing(self) -> None:
        unsent = self._transport.get_write_buffer_size() > 0
        self._start_timer(self._limits.write_timeout_s if unsent else self._limits.linger_s, self._transport.abort)

    def _time_reading(self) -> None:
        """Start the limit of what is awaited now, unless it runs already. While answering there is none."""
        if self._parser.phase is Phase.OVER or self._left:
            return
        awaited = (self._parser.phase, self._parser.begun)
        if self._answering is not None:
            self._stop_timer()
        elif awaited != self._timed:
            match self._parser.phase:
                case Phase.HEAD:
                    self._start_timer(self._limits.head_timeout_s, self._too_slow)
                case Phase.BODY:
                    self._start_timer(self._limits.body_timeout_s, self._too_slow)
                case _:
                    self._start_timer(self._limits.idle_timeout_s, self._close)
            self._timed = awaited

    def _too_slow(self) -> None:
        self._refuse(error_response(408, "The request did not arrive in time"))

    def _start_timer(self, seconds: float, then: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
