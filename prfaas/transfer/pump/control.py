"""The pump's control thread: the only one that knows the pool and the node.

It turns what the node wants into events of the machines, carries out their commands, and looks after the lines: what
they do, and how fast they may. It never waits for a lane.
"""

import selectors
import time
from functools import partial
from typing import assert_never

from prfaas.ipc import Channel
from prfaas.kvcache.blocks import GENERATIONS, BlockPool
from prfaas.kvcache.layout import Window
from prfaas.transfer import incoming, outgoing
from prfaas.transfer.attempts import Answer, Free, Hang, Lost, Opened, Release, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.pump import messages, outbound
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.lines import Lines
from prfaas.transfer.pump.plane import MAX_LANES, Notice, Plane
from prfaas.transfer.tickets import KEY_BYTES, TICKET_BYTES, Keys, mint

REPORT_S = 0.25
#: How soon after the pool has changed; a report for every attempt would cost more than the attempt.
SOON_S = 0.02
#: How often the sockets are asked how much of what was written is on its way, while there are any.
SAMPLE_S = 0.05
#: A node that neither finishes a frame nor reads ours for so long is as good as dead.
NODE_STALL_S = 10.0


class Control:
    def __init__(self, plane: Plane, node: Channel[messages.Command]) -> None:
        self._plane, self._node = plane, node
        self._blocks = BlockPool(plane.start.pool_bytes)
        self._lines = Lines(plane)
        #: Counts what was brought.
        self._generation = 0
        self._report_at = self._sample_at = 0.0

    def run(self) -> None:
        """Returns once the node has closed its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._node, selectors.EVENT_READ)
            selector.register(self._plane.inbox, selectors.EVENT_READ)
            while True:
                found = selector.select(max(0.0, self._due() - time.monotonic()))
                if any(key.fileobj is self._node for key, _ in found):
                    commands = self._node.receive(NODE_STALL_S)
                    if commands is None:
                        return
                    for command in commands:
                        self._obey(command)
                self._perform_all()
                now = time.monotonic()
                if now >= self._sample_at and self._lines.busy:
                    self._lines.sample(now)
                    self._sample_at = now + SAMPLE_S
                if now >= self._report_at:
                    self._tick(now)

    def _due(self) -> float:
        return min(self._report_at, self._sample_at) if self._lines.busy else self._report_at

    def _obey(self, command: messages.Command) -> None:
        now = time.monotonic()
        match command:
            case messages.Reserve():
                self._reserve(command, now)
            case messages.Bring():
                self._bring(command, now)
            case messages.Send():
                self._send(command, now)
            case messages.PartsReady():
                self._plane.tell_sender(outgoing.PartsReady(command.attempt, command.parts, now))
            case messages.Stop():
                self._plane.tell_receiver(incoming.Stop(command.attempt))
            case messages.Release():
                if command.attempt in self._plane.receiver:
                    self._plane.tell_receiver(Release(command.attempt))
                else:
                    self._plane.tell_sender(Release(command.attempt))
            case messages.Allow():
                self._lines.allow(command.region, command.bytes_per_s)
                self._plane.tell_sender(outgoing.Allowance(command.region, command.bytes_per_s))
            case messages.Probe():
                self._probe(command.address)
            case messages.Start():
                raise AssertionError("a pump starts once")
            case _:
                assert_never(command)

    def _report_soon(self) -> None:
        self._report_at = min(self._report_at, time.monotonic() + SOON_S)

    def _perform_all(self) -> None:
        while notices := self._plane.inbox.take():
            for notice in notices:
                self._perform(notice)

    def _perform(self, command: Notice) -> None:
        match command:
            case Hang():
                lane = self._plane.outbound.get(command.lane) or self._plane.inbound.get(command.lane)
                if lane is not None:
                    lane.hang_up(command.cause, command.detail)
            case Lost():
                cause, detail = command.cause.value, command.detail
                boundary_tokens = self._plane.receiver.boundary(command.attempt)
                lost = messages.TransferLost(
                    attempt=command.attempt, cause=cause, detail=detail, boundary_tokens=boundary_tokens
                )
                self._node.send(lost)
            case Free():
                self._plane.held.discard(command.attempt)
                self._blocks.free(command.attempt)
                self._plane.back_keys.pop(command.attempt, None)
                self._report_soon()
            case Answer():
                self._node.send(messages.Released(command.attempt))
            case incoming.Complete():
                done = messages.Received(attempt=command.attempt, payload_bytes=command.payload_bytes)
                self._node.send(done)
            case outgoing.Dial():
                self._dial(command)
            case outgoing.Delivered():
                sent = messages.Sent(
                    attempt=command.attempt,
                    payload_bytes=command.payload_bytes,
                    exposed_s=command.exposed_s,
                    lost_bytes=command.lost_bytes,
                    resent_bytes=command.resent_bytes,
                )
                self._node.send(sent)
            case messages.Probed():
                self._node.send(command)
            case outgoing.Wake() | incoming.Answerable():
                raise AssertionError("done at once by whoever gets it")
            case _:
                assert_never(command)

    def _reserve(self, command: messages.Reserve, now: float) -> None:
        attempt, extent, layout = command.attempt, command.extent, self._plane.start.layout
        rows, state = extent.stop - extent.first, bool(extent.states)
        try:
            layout.check_holds(extent, (Window(extent.first, extent.stop, 0, state),))
        except ValueError as error:
            self._refuse(attempt, 0, str(error))
            return
        needed_bytes = layout.window_bytes(rows, state)
        span = None if self._was_used(attempt) else self._blocks.reserve(attempt, needed_bytes)
        if span is None:
            self._refuse(attempt, needed_bytes)
            return
        windows = (Window(extent.first, extent.stop, span.offset, state),)
        self._open(command, windows, (span.offset, span.nbytes), span.generation, now)

    def _bring(self, command: messages.Bring, now: float) -> None:
        attempt, extent, windows, start = command.attempt, command.extent, command.windows, self._plane.start
        nbytes = start.layout.extent_bytes(extent)
        try:
            start.layout.check_holds(extent, windows)
            start.layout.check_windows(windows, start.pool_bytes)
        except ValueError as error:
            self._refuse(attempt, nbytes, str(error))
            return
        if self._was_used(attempt):
            self._refuse(attempt, nbytes)
            return
        self._generation = self._generation % GENERATIONS + 1
        self._open(command, windows, (-1, nbytes), self._generation, now)

    def _was_used(self, attempt: str) -> bool:
        """Such an id is refused like a request that does not fit: a late frame must never find it open."""
        machines = (self._plane.sender, self._plane.receiver)
        return any(attempt in machine or machine.was_closed(attempt) for machine in machines)

    def _refuse(self, attempt: str, needed_bytes: int, wrong: str = "") -> None:
        free_bytes = self._blocks.free_bytes
        self._node.send(
            messages.Refused(attempt=attempt, needed_bytes=needed_bytes, free_bytes=free_bytes, wrong=wrong)
        )

    def _open(
        self,
        command: messages.Reserve | messages.Bring,
        windows: tuple[Window, ...],
        span: tuple[int, int],
        generation: int,
        now: float,
    ) -> None:
        """The attempt's memory is there; `span` is what the node is told of it."""
        attempt, offset, nbytes = command.attempt, *span
        self._plane.held.add(attempt)
        expires_at = now + command.ttl_s
        opened = Opened(attempt, command.extent, windows, generation, expires_at)
        ticket, keys = b"", Keys(to_receiver=b"", to_sender=b"")
        if command.receive:
            self._plane.tell_receiver(opened)
            keys = self._plane.keys(attempt)
            ticket = mint(
                self._plane.secret,
                attempt=attempt,
                source=command.source,
                incarnation=self._plane.start.incarnation,
                nbytes=self._plane.start.layout.extent_bytes(command.extent),
                expires_at=expires_at,
            )
        else:
            self._plane.tell_sender(opened)
        reserved = messages.Reserved(
            attempt=attempt,
            span=offset,
            nbytes=nbytes,
            generation=generation,
            ticket=ticket,
            key_out=keys.to_receiver,
            key_back=keys.to_sender,
        )
        self._node.send(reserved)
        self._report_soon()

    def _send(self, command: messages.Send, now: float) -> None:
        if wrong := self._wrong_permit(command):
            self._node.send(messages.TransferLost(attempt=command.attempt, cause=Cause.TICKET.value, detail=wrong))
            return
        keys = None
        if self._plane.sealing and command.attempt in self._plane.held:
            keys = Keys(to_receiver=command.key_out, to_sender=command.key_back)
            self._plane.back_keys[command.attempt] = command.key_back
        to = outgoing.Destination(
            address=command.address,
            incarnation=command.peer_incarnation,
            generation=command.generation,
            region=command.region,
            ticket=command.ticket,
            keys=keys,
        )
        self._lines.belongs(to.peer, to.region)
        self._plane.tell_sender(
            outgoing.Begin(
                attempt=command.attempt,
                to=to,
                chunk_ends=command.chunk_ends,
                now=now,
                extent=command.extent,
                urgency=outgoing.Urgency(command.urgency),
                tenant=command.tenant,
                weight=command.weight,
            )
        )

    def _wrong_permit(self, command: messages.Send) -> str:
        """What came from another region is looked at before a lane's thread stumbles over it."""
        if len(command.ticket) not in (0, TICKET_BYTES):
            return f"a ticket of {len(command.ticket)} bytes"
        if self._plane.sealing and not len(command.key_out) == len(command.key_back) == KEY_BYTES:
            return "no keys, and nothing is sent in plain"
        return ""

    def _dial(self, dial: outgoing.Dial) -> None:
        try:
            lane = self._lines.lane(Lane(dial.lane), dial.peer)
        except OSError as error:
            down = outgoing.LaneDown(dial.lane, Cause.CONNECT, error.strerror or str(error), time.monotonic())
            self._plane.tell_sender(down)
            return
        self._plane.run(self._plane.outbound, lane, partial(outbound.carry, self._plane, dial=dial))
        self._lines.pace()

    def _probe(self, address: str) -> None:
        try:
            lane = Lane(self._plane.new_lane()) if len(self._plane.probes) < MAX_LANES else None
        except OSError:
            lane = None
        if lane is None:
            self._node.send(messages.Probed(address=address, incarnation=None))
            return
        self._plane.run(self._plane.probes, lane, partial(outbound.probe, self._plane, address=address))

    def _tick(self, now: float) -> None:
        self._plane.tell_sender(Tick(now))
        self._plane.tell_receiver(Tick(now))
        self._perform_all()
        sender, receiver = self._plane.sender, self._plane.receiver
        load = messages.Load(
            free_bytes=self._blocks.free_bytes,
            total_bytes=self._blocks.total_bytes,
            spans=self._blocks.spans,
            connections=self._plane.connections,
            sent_bytes_total=sender.sent_bytes,
            received_bytes_total=receiver.received_bytes,
            refused_frames_total=receiver.refused_frames,
            failed_transfers_total=sender.failed + receiver.failed,
            egress=self._lines.report(now),
            refused={cause.value: count for cause, count in list(receiver.refused.items())},
        )
        self._node.send(load)
        self._report_at = now + REPORT_S
