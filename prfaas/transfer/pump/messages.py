"""Messages between a node and its pump process: msgpack, one length-prefixed frame each, over a Unix socket.

An attempt has at most one span in one pump. Every Reserve is answered by Reserved or Refused; every Receive ends in
Received or TransferLost; every Send ends in Sent or TransferLost; Release is idempotent, ends whatever the attempt was
doing, and is answered by Released once no thread of the pump can touch the span any more.
"""

import msgspec

from prfaas.kvcache.layout import KvLayout


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message. The pool's memfd is inherited."""

    node: str
    incarnation: int
    namespace: str
    layout: KvLayout
    pool_bytes: int
    listen_host: str
    listen_port: int
    no_progress_s: float
    connect_s: float


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take a span for `tokens` tokens. With `receive` set it accepts one incoming transfer. It is taken back after
    `ttl_s` unless it was released before."""

    attempt: str
    tokens: int
    ttl_s: float
    receive: bool


class Send(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Connect to the destination and offer the parts of this attempt's span; parts follow as they become ready. What is
    sent is counted by `region`."""

    attempt: str
    address: str
    peer_incarnation: int
    generation: int
    chunk_ends: tuple[int, ...]
    region: str = ""


class PartsReady(msgspec.Struct, frozen=True, tag=True):
    attempt: str
    parts: tuple[int, ...]


class Release(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Connect to `address` and ask who is there. Answered by Probed."""

    address: str


Command = Start | Reserve | Send | PartsReady | Release | Probe


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Answer to Start."""

    port: int


class CannotListen(msgspec.Struct, frozen=True, tag=True):
    """Answer to Start when the address cannot be had; the pump then does nothing more."""

    detail: str


class Reserved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    attempt: str
    span: int
    nbytes: int
    generation: int


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    attempt: str
    needed_bytes: int
    free_bytes: int


class Sent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The receiver has applied and checked everything. `exposed_s` runs from the last part becoming ready to that."""

    attempt: str
    payload_bytes: int
    exposed_s: float


class Received(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sealed: every part of the offer has arrived and was checked."""

    attempt: str
    payload_bytes: int


class TransferLost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`cause` is one word of `prfaas.transfer.frames.Cause`; the span stays until it is released."""

    attempt: str
    cause: str
    detail: str = ""


class Released(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Probed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`incarnation` is None when nobody answered in the protocol."""

    address: str
    incarnation: int | None


class Egress(msgspec.Struct, frozen=True, kw_only=True):
    """Towards one region: bytes that wait to leave, and since the start the bytes sent, and of those the ones sent
    while more was waiting, in so many seconds."""

    region: str
    queued_bytes: int
    sent_bytes: int
    backlogged_bytes: float
    backlogged_s: float


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """About four times a second, and whenever a span was taken or freed."""

    free_bytes: int
    total_bytes: int
    spans: int
    connections: int
    sent_bytes_total: int
    received_bytes_total: int
    refused_frames_total: int
    failed_transfers_total: int
    egress: tuple[Egress, ...] = ()


Event = Listening | CannotListen | Reserved | Refused | Sent | Received | TransferLost | Released | Probed | Load
