"""What a worker's engine process and the connector inside its vLLM server say to each other, over a Unix socket.

The first frame comes from the connector, Hello or Refused; the answer to Hello carries two descriptors, of the pool's
memory and of the engine process's own, whose offsets go on where the pool ends. An attempt may touch them between its
Grant and the answer to its Revoke, and nowhere but in the windows of the grant: what a request to the server names is
an attempt, never a place. Every Grant is answered by Granted, every Revoke by Revoked.
"""

import msgspec

from prfaas.engine.vllm.geometry import Geometry
from prfaas.kvcache.layout import Window


class Grant(msgspec.Struct, frozen=True, tag=True):
    """`held` may be read (the first `held_tokens` tokens and the states there), `out` may be written. `ends`: where
    what is written to `out` is announced."""

    attempt: str
    held: tuple[Window, ...] = ()
    held_tokens: int = 0
    out: Window | None = None
    ends: tuple[int, ...] = ()


class Revoke(msgspec.Struct, frozen=True, tag=True):
    attempt: str


Order = Grant | Revoke


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The server's cache, with which vLLM it runs, the model as it was named to it, and what of it no test has seen."""

    geometry: Geometry
    vllm: str
    model: str = ""
    untested: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The connector does not serve this server, which ends: the setting of ours that it comes from, and why."""

    setting: str
    why: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Revoked(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What was held is in the server's own blocks, or, with `ok` false, is not, and the server computes it."""

    attempt: str
    ok: bool


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The first step of the request begins at `at_s` on the machine's monotonic clock; `computed` tokens it need not
    compute."""

    attempt: str
    computed: int
    at_s: float


class Wrote(msgspec.Struct, frozen=True, tag=True):
    """This layer's rows up to `stop` are in `out`, and at `out.stop` its state."""

    attempt: str
    layer: int
    stop: int


class Saved(msgspec.Struct, frozen=True, tag=True):
    """All of `out` is written."""

    attempt: str
    at_s: float


News = Hello | Refused | Granted | Revoked | Loaded | Begun | Wrote | Saved
