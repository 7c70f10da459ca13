"""The pump's control thread: the only one that knows the pool, the attempts and the node.

It turns what the node wants and what the lanes report into events of the machines, and carries out their commands. It
never waits for a lane.
"""

import selectors
import time
from collections.abc import Iterable
from functools import partial
from typing import assert_never

from prfaas.ipc import Channel
from prfaas.kvcache.blocks import BlockPool
from prfaas.transfer import receiver, sender
from prfaas.transfer.attempts import Answer, Drained, Free, LaneId, Lost, Opened, Release, Stop, Tick
from prfaas.transfer.egress import Sent
from prfaas.transfer.frames import Cause
from prfaas.transfer.pump import messages, outbound
from prfaas.transfer.pump.lane import Land, Lane, Order
from prfaas.transfer.pump.plane import MAX_LANES, Notice, Plane

REPORT_S = 0.25
#: How often the sockets are asked how much of what was written is on its way, while something is being sent.
SAMPLE_S = 0.05
#: A node that neither finishes a frame nor reads ours for so long is as good as dead.
NODE_STALL_S = 10.0


class Control:
    def __init__(self, plane: Plane, node: Channel[messages.Command]) -> None:
        self._plane, self._node = plane, node
        self._blocks = BlockPool(plane.start.pool_bytes)
        self._sender = sender.Sender(plane.start.layout)
        self._receiver = receiver.Receiver(plane.start.layout)
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
                for notice in self._plane.inbox.take():
                    self._note(notice)
                now = time.monotonic()
                if self._plane.outbound and now >= self._sample_at:
                    self._sample(now)
                if now >= self._report_at:
                    self._tick(now)

    def _due(self) -> float:
        return min(self._report_at, self._sample_at) if self._plane.outbound else self._report_at

    def _sample(self, now: float) -> None:
        """How much of what the lanes have written is on its way. Lane threads may end meanwhile."""
        lanes = tuple(self._plane.outbound.values())
        self._perform(self._sender.handle(sender.Sampled({lane.id: lane.unacknowledged() for lane in lanes}, now)))
        self._sample_at = now + SAMPLE_S

    def _obey(self, command: messages.Command) -> None:
        now = time.monotonic()
        match command:
            case messages.Reserve():
                self._reserve(command, now)
            case messages.Send():
                to = sender.Destination(command.address, command.peer_incarnation, command.generation, command.region)
                lane = self._plane.new_lane()
                self._perform(self._sender.handle(sender.Begin(lane, command.attempt, to, command.chunk_ends, now)))
            case messages.PartsReady():
                self._perform(self._sender.handle(sender.PartsReady(command.attempt, command.parts, now)))
            case messages.Release():
                self._perform(self._machine(command.attempt).handle(Release(command.attempt)))
            case messages.Probe():
                self._probe(command.address)
            case messages.Start():
                raise AssertionError("a pump starts once")
            case _:
                assert_never(command)

    def _note(self, notice: Notice) -> None:
        match notice:
            case Drained():
                self._perform(self._machine(notice.attempt).handle(notice))
            case (
                receiver.OfferAnnounced()
                | receiver.OfferArrived()
                | receiver.PartArrived()
                | receiver.SealArrived()
                | receiver.Turned()
            ):
                self._perform(self._receiver.handle(notice))
            case sender.Accepted() | sender.PartSent():
                self._perform(self._sender.handle(notice))
            case messages.Probed():
                self._node.send(notice)
            case _:
                assert_never(notice)

    def _perform(self, commands: Iterable[receiver.Command | sender.Command]) -> None:
        for command in commands:
            match command:
                case Stop():
                    if lane := self._plane.lane(command.lane):
                        lane.stop(command.cause, command.detail)
                case Lost():
                    lost = messages.TransferLost(
                        attempt=command.attempt, cause=command.cause.value, detail=command.detail
                    )
                    self._node.send(lost)
                case Free():
                    self._blocks.free(command.attempt)
                    self._report_at = 0.0
                case Answer():
                    self._node.send(messages.Released(command.attempt))
                case receiver.Admit() | receiver.Acknowledge() | sender.Stream():
                    self._order(command.lane, command)
                case receiver.Accept():
                    self._order(command.lane, Land(command.grant, self._memory(command.attempt)))
                case receiver.Complete():
                    done = messages.Received(attempt=command.attempt, payload_bytes=command.payload_bytes)
                    self._node.send(done)
                case sender.Dial():
                    self._dial(command)
                case sender.Delivered():
                    sent = messages.Sent(
                        attempt=command.attempt, payload_bytes=command.payload_bytes, exposed_s=command.exposed_s
                    )
                    self._node.send(sent)
                case _:
                    assert_never(command)

    def _reserve(self, command: messages.Reserve, now: float) -> None:
        """An id that was used before is refused like a request that does not fit: a late frame must never find it
        open."""
        attempt, machines = command.attempt, (self._sender, self._receiver)
        used = any(attempt in machine or machine.was_closed(attempt) for machine in machines)
        needed_bytes = self._plane.start.layout.span_bytes(command.tokens)
        span = None if used else self._blocks.reserve(attempt, needed_bytes)
        if span is None:
            free_bytes = self._blocks.free_bytes
            self._node.send(messages.Refused(attempt=attempt, needed_bytes=needed_bytes, free_bytes=free_bytes))
            return
        opened = Opened(attempt, command.tokens, span.generation, now + command.ttl_s)
        machine = self._receiver if command.receive else self._sender
        self._perform(machine.handle(opened))
        reserved = messages.Reserved(attempt=attempt, span=span.offset, nbytes=span.nbytes, generation=span.generation)
        self._node.send(reserved)
        self._report_at = 0.0

    def _machine(self, attempt: str) -> receiver.Receiver | sender.Sender:
        """The one that has the attempt; either, if none has."""
        return self._receiver if attempt in self._receiver else self._sender

    def _memory(self, attempt: str) -> memoryview:
        span = self._blocks.span(attempt)
        assert span is not None
        return self._plane.memory[span.offset : span.offset + span.nbytes]

    def _order(self, lane_id: LaneId, order: Order) -> None:
        if lane := self._plane.lane(lane_id):
            lane.orders.put(order)

    def _dial(self, dial: sender.Dial) -> None:
        if len(self._plane.outbound) >= MAX_LANES:
            busy = Drained(dial.lane, dial.attempt, time.monotonic(), Cause.BUSY, f"{MAX_LANES} lanes are open")
            self._perform(self._sender.handle(busy))
            return
        body = partial(outbound.send, self._plane, dial=dial, memory=self._memory(dial.attempt))
        self._plane.run(self._plane.outbound, Lane(dial.lane), body)

    def _probe(self, address: str) -> None:
        if len(self._plane.outbound) >= MAX_LANES:
            self._node.send(messages.Probed(address=address, incarnation=None))
            return
        body = partial(outbound.probe, self._plane, address=address)
        self._plane.run(self._plane.outbound, Lane(self._plane.new_lane()), body)

    def _tick(self, now: float) -> None:
        for machine in (self._sender, self._receiver):
            self._perform(machine.handle(Tick(now)))
        load = messages.Load(
            free_bytes=self._blocks.free_bytes,
            total_bytes=self._blocks.total_bytes,
            spans=self._blocks.spans,
            connections=self._plane.connections,
            sent_bytes_total=self._sender.sent_bytes,
            received_bytes_total=self._receiver.received_bytes,
            refused_frames_total=self._receiver.refused_frames,
            failed_transfers_total=self._sender.failed + self._receiver.failed,
            egress=tuple(_egress(sent) for sent in self._sender.egress.readings(now)),
        )
        self._node.send(load)
        self._report_at = now + REPORT_S


def _egress(sent: Sent) -> messages.Egress:
    return messages.Egress(
        region=sent.region,
        queued_bytes=sent.queued_bytes,
        sent_bytes=sent.sent_bytes,
        backlogged_bytes=sent.backlogged_bytes,
        backlogged_s=sent.backlogged_s,
    )
