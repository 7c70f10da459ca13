"""What of a transfer is left to wait for when prefill has ended, if every layer is sent as soon as it is computed.

The state of a layer exists after that layer of the last chunk and not before: that much cannot be hidden.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.transport.line import MBIT, wan_pair
from bench.transport.ours import NORMAL, Pair
from bench.transport.transfers import Transfer
from prfaas.kvcache.layout import KvLayout, Part, TensorKind, TensorSpec, chunk_ends
from tools.wan.rig import Line, Wan

#: 128 MiB a sequence, of which a quarter is state.
_LAYERS, _TOKENS, _CHUNKS = 32, 4096, 4
LAYOUT = KvLayout(
    layers=(
        (
            TensorSpec("latent", TensorKind.TOKENS, "bfloat16", (384,)),
            TensorSpec("recurrent_state", TensorKind.STATE, "float32", (64, 64, 64)),
        ),
    )
    * _LAYERS
)
PREFILL_S = 1.44
RTTS_MS = (30.0, 80.0)
_RUNS = 3
#: Lanes that are kept have been idle for this long when they are warm.
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """`exposed_s`: from the last layer to everything checked at the destination; `state_s`: the state's bytes at the
    line's rate."""

    rtt_ms: float
    warm: bool
    exposed_s: float
    state_s: float


def exposed(rtt_ms: float) -> tuple[Exposed, Exposed]:
    """With lanes that do not exist yet, and with those of the transfer before."""
    line = Line(mbit=MBIT, rtt_ms=rtt_ms)
    cold, warm = [], []
    for _ in range(_RUNS):
        with Wan(line) as wan, wan_pair(wan, LAYOUT, LAYOUT.span_bytes(_TOKENS)) as pair:
            cold.append(_stream(pair))
            time.sleep(_IDLE_S)
            warm.append(_stream(pair))
    state_s = LAYOUT.state_bytes / line.payload_bytes_per_s
    return (
        Exposed(rtt_ms=rtt_ms, warm=False, exposed_s=statistics.median(cold), state_s=state_s),
        Exposed(rtt_ms=rtt_ms, warm=True, exposed_s=statistics.median(warm), state_s=state_s),
    )


def _stream(pair: Pair) -> float:
    transfer = Transfer(
        source=pair.source,
        target=pair.target,
        tokens=_TOKENS,
        chunk_ends=chunk_ends(_TOKENS, _TOKENS // _CHUNKS),
        urgency=NORMAL,
        hold=True,
    )
    pair.driver.begin(transfer)
    pair.driver.run_until(lambda: transfer.is_open, limit_s=5)
    steps = list(_layer_by_layer(transfer))
    began = time.monotonic()
    for number, parts in enumerate(steps, start=1):
        at = began + PREFILL_S * number / len(steps)
        while (wait := at - time.monotonic()) > 0:
            pair.driver.step(wait)
        transfer.ready(parts)
    computed = time.monotonic()
    pair.driver.run_until(lambda: transfer.is_over, limit_s=30)
    transfer.verify()
    assert transfer.received_at is not None
    return transfer.received_at - computed


def _layer_by_layer(transfer: Transfer) -> Iterator[list[Part]]:
    """The parts that exist after each layer of each chunk."""
    parts = transfer.parts
    for stop in transfer.chunk_ends:
        for layer in range(_LAYERS):
            yield [part for part in parts if part.stop == stop and part.layer == layer]
