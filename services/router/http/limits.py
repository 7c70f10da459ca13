"""What one client may take of the HTTP front, in bytes and in time."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit is per connection, but for `max_connections`."""

    #: Request line and headers, and likewise chunk extensions and trailers. More allows longer cookies and tokens.
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    #: A body is held in memory whole. 16 MiB is a prompt of about four million tokens.
    max_body_bytes: int = 16 * 1024 * 1024
    #: Requests sent ahead of their turn. They are held in memory, together at most `max_body_bytes`.
    max_pipelined: int = 32
    #: Clients beyond it get 503. Each idle one costs a few KiB.
    max_connections: int = 10_000
    #: How long a connection may stay without a request. Should exceed the idle time of clients and balancers before it.
    idle_timeout_s: float = 75.0
    #: From the first byte of a request to the end of its headers.
    head_timeout_s: float = 10.0
    #: From there to the end of its body. Must allow `max_body_bytes` over the slowest line served.
    body_timeout_s: float = 60.0
    #: How long a client may read nothing while there is something to send.
    write_timeout_s: float = 60.0
    #: How long a connection that is being closed may take to read its last response.
    linger_s: float = 2.0
