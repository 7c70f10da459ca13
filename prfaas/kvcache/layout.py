"""How one sequence's cache lies in memory: S_kv(l) = a + b*l from a model's layers, and the parts it is shipped in.

A *span* is one contiguous range of the pool that holds a sequence of `tokens` tokens: per layer and tensor one region,
token tensors as [tokens, *shape], state tensors as they are. A *part* is what becomes complete at once: a state tensor,
or the rows of a token tensor that one prefill chunk computed. Both sides derive spans and parts from the same layout,
so that an offer can be compared with what must come.
"""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import msgspec

#: Regions begin on this boundary, so that tensors of any dtype can view them.
ALIGN_BYTES = 64

#: Row counts whose regions a layout remembers.
_KEPT_REGIONS = 256

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


class TensorKind(Enum):
    """TOKENS grows by a row with each token (attention KV, MLA latent); STATE has one size at any length."""

    TOKENS = "tokens"
    STATE = "state"


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a layer. `shape` is that of one token's row (TOKENS) or of the whole tensor (STATE)."""

    name: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one row (TOKENS) or of all of it (STATE)."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


class Part(msgspec.Struct, frozen=True):
    """The rows `start:stop` of a token tensor, or a state tensor (`start` 0, `stop` the length it is valid at).

    `offset` counts from where the offsets of its windows do: from the start of the pool, or of a span.
    """

    index: int
    layer: int
    tensor: int
    start: int
    stop: int
    offset: int
    nbytes: int


class Window(msgspec.Struct, frozen=True):
    """A place in a pool: the KV rows `first:stop` of a sequence, laid out as in a span of so many rows, and with
    `state` its state tensors as they are at `stop`. A span of `tokens` tokens is `Window(0, tokens, offset, True)`."""

    first: int
    stop: int
    offset: int
    state: bool = False


class Extent(msgspec.Struct, frozen=True):
    """What of a sequence one transfer carries: the KV rows `first:stop`, and the states at these boundaries, which rise
    and lie within."""

    first: int
    stop: int
    states: tuple[int, ...] = ()


def whole(tokens: int) -> Extent:
    """All of a sequence of `tokens` tokens; nothing exists of an empty one."""
    return Extent(0, tokens, (tokens,) if tokens else ())


def chunk_ends(tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Where prefill ends its chunks: at absolute multiples of `chunk_tokens`, then at `tokens`."""
    return (*range(chunk_tokens, tokens, chunk_tokens), *([tokens] if tokens else []))


class KvLayout(msgspec.Struct, frozen=True, dict=True):
    """The cache of a model: the tensors of each layer, from the first layer to the last."""

    layers: tuple[tuple[TensorSpec, ...], ...]

    @cached_property
    def state_bytes(self) -> int:
        """a of S_kv(l) = a + b*l."""
        return sum(t.nbytes for layer in self.layers for t in layer if t.kind is TensorKind.STATE)

    @cached_property
    def bytes_per_token(self) -> int:
        """b of S_kv(l) = a + b*l."""
        return sum(t.nbytes for layer in self.layers for t in layer if t.kind is TensorKind.TOKENS)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the geometry; part of the namespace."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]

    def size_bytes(self, tokens: int) -> int:
        """S_kv: bytes that cross for a sequence of `tokens` tokens; nothing exists of an empty one."""
        return self.state_bytes + self.bytes_per_token * tokens if tokens else 0

    def span_bytes(self, tokens: int) -> int:
        """Pool bytes that a sequence takes: its size and the padding between regions."""
        return sum(self._region_bytes(tensor, tokens) for layer in self.layers for tensor in layer) if tokens else 0

    def offsets(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Start of each tensor's region within a span, indexed [layer][tensor]."""
        sizes = (self._region_bytes(tensor, tokens) for layer in self.layers for tensor in layer)
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(tuple(next(starts) for _ in layer) for layer in self.layers)

    def parts(self, tokens: int, ends: tuple[int, ...]) -> tuple[Part, ...]:
        """All parts of a sequence prefilled in chunks that end at `ends`, in the order in which they come to exist.

        Raises ValueError when `ends` does not rise to `tokens`.
        """
        if (ends[-1] if ends else 0) != tokens or any(a >= b for a, b in itertools.pairwise((0, *ends))):
            raise ValueError(f"chunk ends {ends[:4]}... do not rise to {tokens}")
        return tuple(self._walk(tokens, ends)) if tokens else ()

    def window_bytes(self, rows: int, state: bool) -> int:
        """Pool bytes of a window: its tensors and the padding between regions."""
        return self._regions(rows, state).nbytes

    def extent_bytes(self, extent: Extent) -> int:
        """What crosses for an extent."""
        return self.bytes_per_token * (extent.stop - extent.first) + self.state_bytes * len(extent.states)

    def check_windows(self, windows: Sequence[Window], pool_bytes: int) -> None:
        """Raises ValueError unless all of them lie in a pool of `pool_bytes`, and none of them in another."""
        end = 0
        for window in sorted(windows, key=lambda window: window.offset):
            if not 0 <= window.first <= window.stop or window.offset < end:
                raise ValueError(f"{window} makes no sense, or begins before {end}, where another one ends")
            end = window.offset + self.window_bytes(window.stop - window.first, window.state)
        if end > pool_bytes:
            raise ValueError(f"windows end at {end} in a pool of {pool_bytes} bytes")

    def check_holds(self, extent: Extent, windows: Sequence[Window]) -> None:
        """Raises ValueError unless the extent makes sense and the windows hold all of it, and nothing twice."""
        first, stop, states = extent.first, extent.stop, extent.states
        if any(a > b for a, b in itertools.pairwise((0, first, *states, stop))) or len(set(states)) < len(states):
            raise ValueError(f"{first}:{stop} with states at {states[:4]}... makes no sense")
        held, at = _Held(windows), first
        while at < stop:
            at = held.rows(at, at + 1).stop
        for boundary in states:
            held.state(boundary)

    def extent_parts(self, extent: Extent, ends: tuple[int, ...], windows: Sequence[Window]) -> tuple[Part, ...]:
        """The parts of an extent that comes to exist in chunks that end at `ends`, at their absolute offsets in
        `windows`: first the states at `extent.first`, then for each end, layer by layer, rows and the states there.

        Which parts there are, their order and their sizes follow from the extent and the ends alone. Raises ValueError
        when `ends` do not rise from `first` to `stop`, when a state is at none of them, or when the windows do not hold
        all of it once or divide a chunk.
        """
        first, stop, states = extent.first, extent.stop, extent.states
        if (ends[-1] if ends else first) != stop or any(a >= b for a, b in itertools.pairwise((first, *ends))):
            raise ValueError(f"chunk ends {ends[:4]}... do not rise from {first} to {stop}")
        if any(a >= b for a, b in itertools.pairwise(states)) or not {first, *ends}.issuperset(states):
            raise ValueError(f"states at {states[:4]}... do not rise, or are at no chunk end")
        return tuple(self._walk_windows(extent, ends, windows))

    def _walk_windows(self, extent: Extent, ends: tuple[int, ...], windows: Sequence[Window]) -> Iterator[Part]:
        held, wanted = _Held(windows), frozenset(extent.states)
        index, start = itertools.count(), extent.first
        for stop in (*([extent.first] if extent.first in wanted else []), *ends):
            rows = held.rows(start, stop) if start < stop else None
            state = held.state(stop) if stop in wanted else None
            rows_at = self._regions_of(rows).offsets if rows is not None else self._nowhere
            state_at = self._regions_of(state).offsets if state is not None else self._nowhere
            for (layer, number, grows, nbytes), rows_offset, state_offset in zip(
                self._tensors, rows_at, state_at, strict=True
            ):
                if grows and rows is not None:
                    at = rows.offset + rows_offset + (start - rows.first) * nbytes
                    yield Part(next(index), layer, number, start, stop, at, (stop - start) * nbytes)
                elif not grows and state is not None:
                    yield Part(next(index), layer, number, 0, stop, state.offset + state_offset, nbytes)
            start = stop

    @cached_property
    def _tensors(self) -> tuple[tuple[int, int, bool, int], ...]:
        """Of each tensor, in order: layer, number there, whether it grows with tokens, bytes (of a row)."""
        return tuple(
            (layer, number, tensor.kind is TensorKind.TOKENS, tensor.nbytes)
            for layer, tensors in enumerate(self.layers)
            for number, tensor in enumerate(tensors)
        )

    @cached_property
    def _nowhere(self) -> tuple[int, ...]:
        return (0,) * len(self._tensors)

    def _regions_of(self, window: Window) -> "_Regions":
        return self._regions(window.stop - window.first, window.state)

    @cached_property
    def _regions(self) -> "Callable[[int, bool], _Regions]":
        """Kept for each layout by itself: to find a layout among others costs more than the answer."""

        @lru_cache(_KEPT_REGIONS)
        def regions(rows: int, state: bool) -> _Regions:
            sizes = (nbytes * (rows if grows else state) for _, _, grows, nbytes in self._tensors)
            *offsets, end = itertools.accumulate((-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes), initial=0)
            return _Regions(tuple(offsets), end)

        return regions

    def _walk(self, tokens: int, ends: tuple[int, ...]) -> Iterator[Part]:
        offsets, index, start = self.offsets(tokens), itertools.count(), 0
        regions = [
            (layer, number, tensor.kind is TensorKind.TOKENS, tensor.nbytes, offsets[layer][number])
            for layer, tensors in enumerate(self.layers)
            for number, tensor in enumerate(tensors)
        ]
        for stop in ends:
            for layer, number, grows, nbytes, base in regions:
                if grows:
                    first, length = base + start * nbytes, (stop - start) * nbytes
                    yield Part(next(index), layer, number, start, stop, first, length)
                elif stop == tokens:
                    yield Part(next(index), layer, number, 0, stop, base, nbytes)
            start = stop

    @staticmethod
    def _region_bytes(tensor: TensorSpec, tokens: int) -> int:
        exact = tensor.nbytes * (tokens if tensor.kind is TensorKind.TOKENS else 1)
        return -(-exact // ALIGN_BYTES) * ALIGN_BYTES


class _Regions(NamedTuple):
    """Where each tensor's region begins within a window, and where the last one ends."""

    offsets: tuple[int, ...]
    nbytes: int


class _Held:
    """Finds what windows hold. Raises ValueError when they hold anything twice."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._rows = sorted((each for each in windows if each.first < each.stop), key=lambda each: each.first)
        self._firsts = [each.first for each in self._rows]
        self._states = {each.stop: each for each in windows if each.state}
        if any(a.stop > b.first for a, b in itertools.pairwise(self._rows)):
            raise ValueError("windows hold the same rows")
        if len(self._states) < sum(each.state for each in windows):
            raise ValueError("windows hold the same states")

    def rows(self, first: int, stop: int) -> Window:
        index = bisect_right(self._firsts, first) - 1
        if index < 0 or self._rows[index].stop < stop:
            raise ValueError(f"no window holds the rows {first}:{stop}")
        return self._rows[index]

    def state(self, boundary: int) -> Window:
        if boundary not in self._states:
            raise ValueError(f"no window holds the states at {boundary}")
        return self._states[boundary]


def namespace_digest(weights: str, tokenizer: str, layout: KvLayout, hash_unit_tokens: int) -> str:
    """The namespace (R12): what two nodes must share before one may read the other's KV."""
    fields = (weights, tokenizer, layout.digest, hash_unit_tokens)
    return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()[:32]
