"""What the kernel knows about a connection: the fields of its `struct tcp_info` that tell how a line is doing."""

import socket
import struct
from dataclasses import dataclass

#: Up to `tcpi_rtt`; up to `tcpi_total_retrans`, `tcpi_bytes_acked`, `tcpi_notsent_bytes`, `tcpi_delivery_rate`; up to
#: `tcpi_bytes_retrans` (linux/tcp.h). An older kernel gives less than we ask for: what it does not know is 0.
_RTT = struct.Struct("=68xI")
_ACKED = struct.Struct("=120xQ")
_NOTSENT = struct.Struct("=144xI")
_RATE = struct.Struct("=160xQ")
_RETRANSMITTED = struct.Struct("=208xQ")
_BYTES = 256


@dataclass(frozen=True, slots=True)
class LineInfo:
    """`rtt_s` is None before the first round trip. Counters begin with the connection."""

    rtt_s: float | None
    acknowledged_bytes: int
    unsent_bytes: int
    delivery_bytes_per_s: int
    retransmitted_bytes: int


def line_info(sock: socket.socket) -> LineInfo:
    """Raises OSError for a socket that is closed."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES).ljust(_BYTES, b"\0")
    (rtt_us,) = _RTT.unpack_from(info)
    return LineInfo(
        rtt_s=rtt_us / 1e6 if rtt_us else None,
        acknowledged_bytes=_ACKED.unpack_from(info)[0],
        unsent_bytes=_NOTSENT.unpack_from(info)[0],
        delivery_bytes_per_s=_RATE.unpack_from(info)[0],
        retransmitted_bytes=_RETRANSMITTED.unpack_from(info)[0],
    )
