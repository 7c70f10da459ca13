"""How one sequence's cache lies in memory: S_kv(l) = a + b*l from a model's layers, and the parts it is shipped in.

A *span* is one contiguous range of the pool that holds a sequence of `tokens` tokens: per layer and tensor one region,
token tensors as [tokens, *shape], state tensors as they are. A *part* is what becomes complete at once: a state tensor,
or the rows of a token tensor that one prefill chunk computed. Both sides derive spans and parts from the same layout,
so that an offer can be compared with what must come.
"""

import hashlib
import itertools
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from math import prod

import msgspec

#: Regions begin on this boundary, so that tensors of any dtype can view them.
ALIGN_BYTES = 64

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

    `offset` counts from the start of the span.
    """

    index: int
    layer: int
    tensor: int
    start: int
    stop: int
    offset: int
    nbytes: int


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

    def prefix(self, span_tokens: int, tokens: int) -> tuple[Part, ...]:
        """The tensors of the first `tokens` tokens of a span of `span_tokens`, whole. A state has no prefix: with one
        it is all or nothing."""
        if not tokens:
            return ()
        assert tokens == span_tokens or (tokens < span_tokens and not self.state_bytes), "a state has no prefix"
        offsets, index = self.offsets(span_tokens), itertools.count()
        return tuple(
            Part(next(index), layer, number, 0, tokens, offsets[layer][number], tensor.nbytes * rows)
            for layer, tensors in enumerate(self.layers)
            for number, tensor in enumerate(tensors)
            for rows in (tokens if tensor.kind is TensorKind.TOKENS else 1,)
        )

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


def namespace_digest(weights: str, tokenizer: str, layout: KvLayout, hash_unit_tokens: int) -> str:
    """The namespace (R12): what two nodes must share before one may read the other's KV."""
    fields = (weights, tokenizer, layout.digest, hash_unit_tokens)
    return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()[:32]
