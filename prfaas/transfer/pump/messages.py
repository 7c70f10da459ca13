"""Messages between a node and its pump process: msgpack, one length-prefixed frame each, over a Unix socket.

An attempt has memory in one pump at most once. Every Reserve or Bring is answered by Reserved or Refused, and with
`receive` ends in Received or TransferLost; every Send ends in Sent or TransferLost; Release is idempotent, ends
whatever the attempt was doing, and is answered by Released once no thread of the pump can touch its memory any more.
"""

from typing import Any, Literal

import msgspec

from prfaas.kvcache.layout import Extent, KvLayout, Window

Integrity = Literal["crc32c", "aes-gcm"]


#: Fields that no log may show.
_SECRETS = frozenset({"ticket", "key_out", "key_back"})


class _Secretive(msgspec.Struct, frozen=True):
    """Shows itself without its secrets."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in _SECRETS]


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message. The pool's memfd is inherited. `integrity`: how payloads are protected, "aes-gcm" also from being
    read. `congestion`: TCP congestion control of the lanes, "" for the system's own; where the system does not allow it
    the lanes run with what they have, and Egress says with which. To each peer lanes are opened as there is work for
    them, up to as many as its line needs, which is never more than `max_lanes`."""

    node: str
    incarnation: int
    namespace: str
    layout: KvLayout
    pool_bytes: int
    listen_host: str
    listen_port: int
    no_progress_s: float
    connect_s: float
    integrity: Integrity = "crc32c"
    congestion: str = ""
    min_lanes: int = 8
    max_lanes: int = 16
    lane_idle_s: float = 300.0


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take a span for the extent, laid out as one window; its only states are those at its end, if any. With `receive`
    set it accepts one incoming transfer, of exactly this extent, from the node `source`. It is taken back after `ttl_s`
    unless it was released before."""

    attempt: str
    extent: Extent
    ttl_s: float
    receive: bool
    source: str = ""


class Bring(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Use memory that is the node's own, be it that the node keeps the pool's books itself or that it has reserved the
    memory before: the extent lies in these windows of the pool. Otherwise as Reserve. After `ttl_s` the transfer is
    over; that nothing touches the windows any more is only known from Released."""

    attempt: str
    extent: Extent
    windows: tuple[Window, ...]
    ttl_s: float
    receive: bool
    source: str = ""


class Send(_Secretive, frozen=True, tag=True, kw_only=True):
    """Offer the parts of `extent` to the destination, or of all that this attempt's memory holds; parts, numbered as
    the layout numbers those of the extent sent, follow as they become ready. No chunk may lie in two windows. What is
    sent is counted by `region`. `ticket` and the keys are those of the receiver's Reserved: `key_out` seals what goes
    there, `key_back` what comes back. Tenants share the lines to a peer by `weight`."""

    attempt: str
    address: str
    peer_incarnation: int
    generation: int
    chunk_ends: tuple[int, ...]
    extent: Extent | None = None
    region: str = ""
    ticket: bytes = b""
    key_out: bytes = b""
    key_back: bytes = b""
    urgency: int = 2
    tenant: str = ""
    weight: float = 1.0


class PartsReady(msgspec.Struct, frozen=True, tag=True):
    attempt: str
    parts: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Take no more of an incoming transfer. It ends in TransferLost unless it has ended before; its memory stays."""

    attempt: str


class Release(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Connect to `address` and ask who is there. Answered by Probed."""

    address: str


class Allow(msgspec.Struct, frozen=True, tag=True):
    """From now on at most so many bytes per second may leave for `region`, over all lanes together; None: as many as
    the line takes."""

    region: str
    bytes_per_s: float | None


Command = Start | Reserve | Bring | Send | PartsReady | Stop | Release | Probe | Allow


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Answer to Start."""

    port: int


class CannotListen(msgspec.Struct, frozen=True, tag=True):
    """Answer to Start when the address cannot be had; the pump then does nothing more."""

    detail: str


class Reserved(_Secretive, frozen=True, tag=True, kw_only=True):
    """`span` and `nbytes`: where in the pool the memory lies; of a Bring -1, and what the extent's transfer carries.
    With `receive`: the `ticket` that lets the source send, and the attempt's keys as the source's Send takes them."""

    attempt: str
    span: int
    nbytes: int
    generation: int
    ticket: bytes = b""
    key_out: bytes = b""
    key_back: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """There is no room; or the request makes no sense, and `wrong` says why."""

    attempt: str
    needed_bytes: int
    free_bytes: int
    wrong: str = ""


class Sent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The receiver has applied and checked everything. `exposed_s` runs from the last part becoming ready to that.
    `lost_bytes` were on lanes that were lost and not acknowledged, what was just being written included; of these
    `resent_bytes` were sent again."""

    attempt: str
    payload_bytes: int
    exposed_s: float
    lost_bytes: int = 0
    resent_bytes: int = 0


class Received(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sealed: every part of the offer has arrived and was checked."""

    attempt: str
    payload_bytes: int


class TransferLost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`cause` is one word of `prfaas.transfer.frames.Cause`; its memory stays until it is released. With
    `receive`: rows of the extent up to `boundary_tokens` have arrived, were checked, and are touched no more; of an
    extent with states nothing is good before all is."""

    attempt: str
    cause: str
    detail: str = ""
    boundary_tokens: int = 0


class Released(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Probed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`incarnation` is None when nobody answered in the protocol."""

    address: str
    incarnation: int | None


class Egress(msgspec.Struct, frozen=True, kw_only=True):
    """Towards one region: bytes that wait to leave, and since the start the bytes sent, and of those the ones sent
    while more was waiting, in so many seconds. Of the `lanes` that are open: the smallest round trip, the congestion
    control in use, and what the kernel holds and has not sent; `retransmitted_bytes` since the start. `queue_age_s`:
    how long the oldest piece that is ready has been waiting; `stalled_s`: for how long nothing has come back of what is
    owed from there, None when nothing is."""

    region: str
    queued_bytes: int
    sent_bytes: int
    backlogged_bytes: float
    backlogged_s: float
    lanes: int = 0
    rtt_s: float | None = None
    retransmitted_bytes: int = 0
    unsent_bytes: int = 0
    queue_age_s: float = 0.0
    congestion: str = ""
    stalled_s: float | None = None


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """About four times a second, and whenever a span was taken or freed. `refused`: frames and connections that were
    not acceptable, by their `Cause`."""

    free_bytes: int
    total_bytes: int
    spans: int
    connections: int
    sent_bytes_total: int
    received_bytes_total: int
    refused_frames_total: int
    failed_transfers_total: int
    egress: tuple[Egress, ...] = ()
    refused: dict[str, int] = {}


Event = Listening | CannotListen | Reserved | Refused | Sent | Received | TransferLost | Released | Probed | Load
