"""Real pump processes over loopback, a peer that speaks the wire format by hand, and a line that damages what it
carries."""

import contextlib
import itertools
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from prfaas.ipc import Channel
from prfaas.kvcache.layout import Extent, KvLayout, TensorKind, TensorSpec, Window, chunk_ends, whole
from prfaas.transfer import frames, greeting, offer
from prfaas.transfer.frames import WIRE, Cause, Header, Kind
from prfaas.transfer.pieces import PIECE_BYTES, Pieces
from prfaas.transfer.pump import messages as m

LIVENESS_S = 20.0
#: Frames other than DATA are smaller, once a transfer is under way.
CONTROL_BYTES = 4096
POOL_BYTES = 64 << 20
NAMESPACE = "kimi-tiny/fp32"
NODE = "n0"

#: Two linear-attention layers around one with attention: two kinds of state, and 8 KiB of KV per token.
LAYOUT = KvLayout(
    layers=(
        (
            TensorSpec("conv_state", TensorKind.STATE, "float32", (96, 4)),
            TensorSpec("recurrent_state", TensorKind.STATE, "float32", (4, 32, 32)),
        ),
        (TensorSpec("latent", TensorKind.TOKENS, "bfloat16", (4096,)),),
        (TensorSpec("recurrent_state", TensorKind.STATE, "float32", (4, 32, 31)),),
    )
)
CHUNK_TOKENS = 64

E = TypeVar("E", bound=m.Event)


def attempt_id() -> str:
    return os.urandom(16).hex()


def parts_of(tokens: int) -> tuple[int, ...]:
    return tuple(part.index for part in LAYOUT.parts(tokens, chunk_ends(tokens, CHUNK_TOKENS)))


def start_message(
    incarnation: int,
    *,
    namespace: str = NAMESPACE,
    port: int = 0,
    no_progress_s: float = 5.0,
    connect_s: float = 5.0,
    **settings: Any,
) -> m.Start:
    return m.Start(
        node=NODE,
        incarnation=incarnation,
        namespace=namespace,
        layout=LAYOUT,
        pool_bytes=POOL_BYTES,
        listen_host="127.0.0.1",
        listen_port=port,
        no_progress_s=no_progress_s,
        connect_s=connect_s,
        **settings,
    )


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Pump:
    """One pump process and the node's end of its socket."""

    def __init__(self, **settings: Any) -> None:
        self.incarnation = random.getrandbits(63)
        self._fd = os.memfd_create("kv-pool")
        os.ftruncate(self._fd, POOL_BYTES)
        self.pool = memoryview(mmap.mmap(self._fd, POOL_BYTES))
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prfaas.transfer.pump", "--fd", str(theirs.fileno()), "--pool-fd", str(self._fd)],
            pass_fds=(theirs.fileno(), self._fd),
        )
        theirs.close()
        self.node: Channel[m.Event] = Channel(ours, m.Event)
        self.load: m.Load | None = None
        self.strangers: list[socket.socket] = []
        self._events: list[m.Event] = []
        self.tell(start_message(self.incarnation, **settings))
        self.port = self.await_event(m.Listening).port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tell(self, command: m.Command) -> None:
        self.node.send(command)

    def await_event(self, kind: type[E], attempt: str | None = None) -> E:
        """The next event of this kind (and attempt). Others are kept for whoever waits for them."""
        return self._await(
            lambda e: isinstance(e, kind) and (attempt is None or getattr(e, "attempt", None) == attempt)
        )

    def outcome(self, attempt: str) -> m.Sent | m.Received | m.TransferLost:
        def of_attempt(event: m.Event) -> bool:
            return isinstance(event, m.Sent | m.Received | m.TransferLost) and event.attempt == attempt

        return self._await(of_attempt)

    def await_load(self, wanted: Callable[[m.Load], bool]) -> m.Load:
        deadline = time.monotonic() + LIVENESS_S
        while self.load is None or not wanted(self.load):
            assert time.monotonic() < deadline, f"still {self.load}"
            self._receive(deadline)
        return self.load

    def pending(self, kind: type[E]) -> list[E]:
        """Events of this kind that have come and that nobody has waited for."""
        return [event for event in self._events if isinstance(event, kind)]

    def reserve(
        self, attempt: str, held: int | Extent, *, receive: bool, ttl_s: float = 60.0, source: str = NODE
    ) -> m.Reserved:
        """Room for an extent, or for all of a sequence of so many tokens."""
        extent = whole(held) if isinstance(held, int) else held
        self.tell(m.Reserve(attempt=attempt, extent=extent, ttl_s=ttl_s, receive=receive, source=source))
        return self.await_event(m.Reserved, attempt)

    def bring(
        self, attempt: str, extent: Extent, windows: tuple[Window, ...], *, receive: bool, ttl_s: float = 60.0
    ) -> m.Reserved:
        self.tell(m.Bring(attempt=attempt, extent=extent, windows=windows, ttl_s=ttl_s, receive=receive, source=NODE))
        return self.await_event(m.Reserved, attempt)

    def release(self, attempt: str) -> None:
        self.tell(m.Release(attempt))
        self.await_event(m.Released, attempt)

    def span(self, reserved: m.Reserved) -> memoryview:
        return self.pool[reserved.span : reserved.span + reserved.nbytes]

    def fill(self, reserved: m.Reserved) -> None:
        self.span(reserved)[:] = os.urandom(reserved.nbytes)

    def send_to(
        self, peer: "Pump", here: str, there: m.Reserved, tokens: int, address: str | None = None, **settings: Any
    ) -> None:
        """Chunks end as those of a sequence of so many tokens do, unless `settings` say otherwise."""
        self.tell(
            m.Send(
                attempt=here,
                address=address or peer.address,
                peer_incarnation=peer.incarnation,
                generation=there.generation,
                ticket=there.ticket,
                key_out=there.key_out,
                key_back=there.key_back,
                **{"chunk_ends": chunk_ends(tokens, CHUNK_TOKENS)} | settings,
            )
        )

    def look(self) -> m.Load:
        """Its load as of now: what was reported earlier does not count."""
        self.release(attempt_id())
        self.load = None
        return self.await_load(lambda _: True)

    def assert_baseline(self) -> m.Load:
        """No span, all of the pool free. Lanes stay open."""
        self.look()
        return self.await_load(lambda load: not load.spans and load.free_bytes == POOL_BYTES)

    def hang_up(self) -> None:
        """End what wrote to this pump by hand."""
        for stranger in self.strangers:
            stranger.close()
        self.strangers.clear()

    def close(self) -> None:
        self.hang_up()
        self.node.close()
        try:
            self.process.wait(LIVENESS_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._fd)

    def _await(self, wanted: Callable[[m.Event], bool]) -> E:
        deadline = time.monotonic() + LIVENESS_S
        while True:
            for index, event in enumerate(self._events):
                if wanted(event):
                    return self._events.pop(index)
            self._receive(deadline)

    def _receive(self, deadline: float) -> None:
        events = self.node.receive(max(0.01, deadline - time.monotonic()))
        assert events is not None, "the pump has ended"
        assert events, f"nothing in time; have {self._events[-8:]}, {self.load}"
        for event in events:
            if isinstance(event, m.Load):
                self.load = event
            else:
                self._events.append(event)
        assert time.monotonic() < deadline, f"not in time; have {self._events[-8:]}, {self.load}"


def start_transfer(
    source: Pump, target: Pump, tokens: int, *, address: str | None = None, **settings: Any
) -> tuple[str, m.Reserved, m.Reserved]:
    """Reserved on both sides, filled at the source and offered; no part is ready yet."""
    attempt = attempt_id()
    there = target.reserve(attempt, tokens, receive=True)
    here = source.reserve(attempt, tokens, receive=False)
    source.fill(here)
    source.send_to(target, attempt, there, tokens, address, **settings)
    return attempt, here, there


def assert_transfers(source: Pump, target: Pump) -> None:
    """An ordinary transfer works and leaves nothing behind."""
    attempt, here, there = start_transfer(source, target, 200)
    source.tell(m.PartsReady(attempt, parts_of(200)))
    assert isinstance(source.outcome(attempt), m.Sent)
    assert isinstance(target.outcome(attempt), m.Received)
    latent = next(part for part in LAYOUT.parts(200, chunk_ends(200, CHUNK_TOKENS)) if part.layer == 1)
    place = slice(latent.offset, latent.offset + latent.nbytes)
    assert source.span(here)[place] == target.span(there)[place]
    end(attempt, source, target)


def end(attempt: str, *held_by: Pump) -> None:
    for pump in held_by:
        pump.release(attempt)


def lost(pump: Pump, attempt: str) -> m.TransferLost:
    outcome = pump.outcome(attempt)
    assert isinstance(outcome, m.TransferLost), f"{outcome}"
    return outcome


def assert_same_parts(source: Pump, here: m.Reserved, target: Pump, there: m.Reserved, tokens: int) -> None:
    for part in LAYOUT.parts(tokens, chunk_ends(tokens, CHUNK_TOKENS)):
        ours = source.span(here)[part.offset : part.offset + part.nbytes]
        theirs = target.span(there)[part.offset : part.offset + part.nbytes]
        assert ours == theirs, f"{part} differs"


def scattered(extent: Extent, edges: tuple[int, ...], at: int, draw: random.Random) -> tuple[Window, ...]:
    """A window for the rows up to each edge and one for each of the states, in any order, from `at` in the pool on."""
    rooms = [(first, stop, False) for first, stop in itertools.pairwise((extent.first, *edges))]
    rooms += [(boundary, boundary, True) for boundary in extent.states]
    windows = []
    for first, stop, state in draw.sample(rooms, len(rooms)):
        windows.append(Window(first, stop, at, state))
        at += LAYOUT.window_bytes(stop - first, state)
    return tuple(windows)


def taken_bytes(windows: tuple[Window, ...]) -> int:
    return sum(LAYOUT.window_bytes(each.stop - each.first, each.state) for each in windows)


class WirePeer:
    """One end of a connection whose frames are written by hand, in plain: what a broken or hostile peer might say."""

    def __init__(self, sock: socket.socket, attempt: str, generation: int = 0, incarnation: int = 0) -> None:
        self.sock, self.attempt, self.generation, self._incarnation = sock, attempt, generation, incarnation
        self.own_incarnation = 1
        sock.settimeout(LIVENESS_S)

    def hello(
        self,
        namespace: str = NAMESPACE,
        wire: tuple[int, int] = (WIRE.oldest, WIRE.newest),
        node: str = NODE,
        integrity: str = "crc32c",
    ) -> Header:
        hello = greeting.Hello(
            node=node,
            own_incarnation=self.own_incarnation,
            namespace=namespace,
            oldest_wire=wire[0],
            newest_wire=wire[1],
            incarnation=self._incarnation,
            integrity=integrity,
        )
        self.write(Kind.HELLO, greeting.pack(hello))
        return self.read()

    def write(self, kind: Kind, payload: bytes = b"") -> None:
        header = frames.header_for(kind, payload, attempt=self.attempt, generation=self.generation)
        self.sock.sendall(header + payload)

    def offer(self, tokens: int, ticket: bytes, *, without: int | None = None) -> Header:
        made, _ = offered(tokens)
        groups = tuple(group for number, group in enumerate(made.groups) if number != without)
        self.write(Kind.OFFER, ticket + greeting.pack(msgspec.structs.replace(made, groups=groups)))
        return self.read()

    def data(self, tokens: int, number: int, payload: bytes | None = None, **changes: int) -> bytes:
        """A frame with one part of the transfer; every part here fits one frame."""
        first, stop = pieces_of(tokens).of_part(number)
        run = pieces_of(tokens).run(first, stop)
        payload = os.urandom(run.nbytes) if payload is None else payload
        fields = {
            "generation": self.generation,
            "index": first,
            "count": stop - first,
            "offset": run.offset,
            "length": len(payload),
        } | changes
        header = Header(kind=Kind.DATA, attempt=self.attempt, payload_crc=frames.crc32c(payload), **fields)
        self.sock.sendall(frames.encode(header) + payload)
        return payload

    def seal(self, tokens: int) -> None:
        self.write(Kind.SEAL, greeting.pack(offer.seal_for(whole(tokens), pieces_of(tokens))))

    def read(self) -> Header:
        """Header of the next frame that says something; a refusal is raised as the ProtocolError it stands for."""
        while True:
            header = frames.decode(self._exactly(frames.HEADER_BYTES))
            payload = self._exactly(header.length)
            if header.kind in (Kind.REFUSE, Kind.ABORT):
                raise greeting.refused(payload)
            if header.kind is not Kind.KEEPALIVE:
                return header

    def await_frame(self, kind: Kind) -> Header:
        """The next frame of this kind."""
        while (header := self.read()).kind is not kind:
            pass
        return header

    def is_closed(self) -> bool:
        """Whether the other end hangs up, saying nothing more than that it was there."""
        try:
            while data := self.sock.recv(frames.HEADER_BYTES):
                if frames.decode(data).kind is not Kind.KEEPALIVE:
                    return False
        except ConnectionError:
            pass
        return True

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self.sock.recv(nbytes - len(data))
            if not more:
                raise frames.ProtocolError(Cause.PEER_GONE, "closed")
            data += more
        return data


def offered(tokens: int) -> tuple[offer.Offer, Pieces]:
    """All of a sequence of so many tokens, in a span that begins where its pool does."""
    span = (Window(0, tokens, 0, state=True),)
    return offer.offer_for(LAYOUT, whole(tokens), chunk_ends(tokens, CHUNK_TOKENS), span, PIECE_BYTES)


def pieces_of(tokens: int) -> Pieces:
    return offered(tokens)[1]


def dial(pump: Pump, attempt: str, generation: int) -> WirePeer:
    """A hand-written sender, connected to the pump."""
    sock = socket.create_connection(("127.0.0.1", pump.port), timeout=LIVENESS_S)
    pump.strangers.append(sock)
    return WirePeer(sock, attempt, generation, pump.incarnation)


class Line:
    """A TCP line to a pump, for any number of connections. `meddle(bytes so far, data)` sees what diallers send and
    returns what arrives; None cuts that connection. A stalled line stays open and carries nothing. With `bytes_per_s`
    it is as slow as that, and takes in hardly more than it has carried."""

    def __init__(
        self,
        pump: Pump,
        meddle: Callable[[int, bytes], bytes | None] = lambda _, data: data,
        *,
        bytes_per_s: float | None = None,
    ) -> None:
        self._target, self._meddle, self._bytes_per_s = pump.port, meddle, bytes_per_s
        self._door = socket.create_server(("127.0.0.1", 0))
        if bytes_per_s is not None:
            # Loopback's segments may be 64 KiB long, and one that does not fit waits for a timer that backs off: room
            # for several, and short ones.
            self._door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            self._door.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 8 << 10)
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.carried = 0
        #: Connections that were ever made through it, and those that are open: pairs of sockets.
        self.made = 0
        self.open: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self._broken = False
        #: What each has taken in and not passed on yet.
        self._held: dict[tuple[socket.socket, socket.socket], int] = {}
        self._swallowed: list[tuple[socket.socket, socket.socket]] = []
        self._turn = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def hold(self) -> None:
        """Stall, and wait until that keeps payload back: of this its sender hears no acknowledgement until it flows."""
        self.stall()
        await_true(lambda: max([*self._held.values()], default=0) > CONTROL_BYTES, "nothing is sent")

    def flow(self) -> None:
        """It carries again."""
        self._flows.set()

    def swallow(self) -> None:
        """The connections that are open now carry nothing any more, for ever; new ones do."""
        self._swallowed += self.open

    def cut(self, connections: int | None = None) -> None:
        """End so many of the open connections, those that have most in hand, or all."""
        for pair in sorted(self.open, key=lambda pair: -self._held.get(pair, 0))[:connections]:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def go_down(self) -> None:
        """All connections end, and new ones end at once."""
        self._broken = True
        self.cut()

    def heal(self) -> None:
        self._broken = False

    def close(self) -> None:
        self._flows.set()
        # Wakes the thread that accepts.
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                if self._broken:
                    near.close()
                    continue
                pair = near, socket.create_connection(("127.0.0.1", self._target))
                self.made += 1
                self.open.append(pair)
                threading.Thread(target=self._forth, args=(pair,), daemon=True).start()
                threading.Thread(target=self._back, args=(pair,), daemon=True).start()

    def _forth(self, pair: tuple[socket.socket, socket.socket]) -> None:
        near, far = pair
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                if pair in self._swallowed:
                    continue
                self._held[pair] = len(data)
                with self._turn:
                    if self._bytes_per_s is not None:
                        time.sleep(len(data) / self._bytes_per_s)
                    self._flows.wait()
                    self._held[pair] = 0
                    changed = self._meddle(self.carried, data)
                    self.carried += len(data)
                if changed is None:
                    break
                far.sendall(changed)
        self._end(pair)

    def _back(self, pair: tuple[socket.socket, socket.socket]) -> None:
        near, far = pair
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                self._flows.wait()
                if pair not in self._swallowed:
                    near.sendall(data)
        self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._held.pop(pair, None)
        if pair in self.open:
            self.open.remove(pair)
        for sock in pair:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def pumps(*settings: dict[str, Any]) -> Iterator[list[Pump]]:
    with contextlib.ExitStack() as stack:
        started = []
        for setting in settings:
            pump = Pump(**setting)
            stack.callback(pump.close)
            started.append(pump)
        yield started


def kill(pump: Pump) -> None:
    pump.process.send_signal(signal.SIGKILL)
    pump.process.wait()
