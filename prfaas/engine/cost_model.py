"""A simulated engine for demonstrations and tests at the scale of the paper: it takes the time a large model would take
and makes as many bytes, while spending next to no CPU.

Waiting is its computation. Everything else is real: the cache's bytes are exported, restored and hashed, and each token
is drawn from a digest of *all* bytes of its sequence, so that one wrong byte in a transfer changes the tokens, and a
sequence draws the same tokens wherever and in whatever pieces it was computed.
"""

import hashlib
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prfaas.cluster import SEEDED_DRAWS, Namespace
from prfaas.engine.cost_content import Content, prefix_hashes
from prfaas.engine.cost_profile import CostConfig
from prfaas.engine.cost_rows import Rows
from prfaas.engine.fingerprint import HASH_UNIT_TOKENS, tokenizer_digest
from prfaas.engine.gathering import Place, gather
from prfaas.engine.port import Cache, EngineInfo, LayerHook, StepInput, StepOutput
from prfaas.errors import ConfigError
from prfaas.kvcache.layout import KvLayout, Part, TensorKind, namespace_digest
from prfaas.request import Sampling

#: Part of the namespace: raise it when the contents of a cache change for the same tokens.
CONTENT_VERSION = 1
TOP_LOGITS = 8
#: The most by which one late piece of work may shorten the next.
MAX_LATE_S = 0.005


def write_config(directory: Path, **overrides: Any) -> None:
    """Make `directory` a cost model, with fields of `CostConfig` as overrides; it gets the byte-level tokenizer of the
    tiny models unless it has one. Raises msgspec.ValidationError."""
    from prfaas.engine.tiny_tokenizer import write_tokenizer  # an engine process needs no tokenizer library

    config = msgspec.convert(overrides, CostConfig)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


class CostCache:
    """A sequence: its prefix hash, and the rows of each token tensor."""

    def __init__(self, layout: KvLayout, content: Content) -> None:
        self.tokens = 0
        self.prefix_hash = 0
        self.rows = {
            (layer, number): Rows(content, (layer, number))
            for layer, tensors in enumerate(layout.layers)
            for number, tensor in enumerate(tensors)
            if tensor.kind is TensorKind.TOKENS
        }

    def append(self, chunk: bytes) -> None:
        hashes = prefix_hashes(self.prefix_hash, self.tokens, chunk)
        for rows in self.rows.values():
            rows.append(hashes)
        self.tokens += len(hashes)
        self.prefix_hash = int(hashes[-1])

    def digest(self) -> bytes:
        """Of every byte: the rows as they are, the states through the hash that they hold."""
        ends = struct.pack("<QQ", self.prefix_hash, self.tokens)
        return hashlib.blake2b(b"".join(rows.digest() for rows in self.rows.values()) + ends, digest_size=16).digest()


class CostModelEngine:
    """The engine port over a folder that `write_config` has made."""

    def __init__(self, model_dir: Path) -> None:
        try:
            self._config = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=CostConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(model_dir / "config.json"), str(error)) from error
        layout = self._config.layout()
        weights = f"cost_model {CONTENT_VERSION} {self._config.vocab_tokens}"
        self._content, self._pace = Content(layout), _Pace()
        self.info = EngineInfo(
            model=model_dir.resolve().name,
            namespace=Namespace(namespace_digest(weights, tokenizer_digest(model_dir), layout, HASH_UNIT_TOKENS)),
            layout=layout,
            chunk_tokens=self._config.chunk_tokens,
            max_context_tokens=self._config.max_context_tokens,
            vocab_tokens=self._config.vocab_tokens,
            repeatable=True,
            capabilities=(SEEDED_DRAWS,),
            tokenizer=tokenizer_digest(model_dir),
        )

    def new_cache(self) -> CostCache:
        return CostCache(self.info.layout, self._content)

    def prefill(self, cache: Cache, chunk: bytes, on_layer: LayerHook | None) -> None:
        assert isinstance(cache, CostCache) and chunk
        self._pace.begin()
        start_s = self._config.prefill_s(cache.tokens)
        cache.append(chunk)
        layers = len(self.info.layout.layers)
        layer_s = (self._config.prefill_s(cache.tokens) - start_s) / layers
        for layer in range(layers):
            self._pace.spend(layer_s)
            if on_layer is not None:
                on_layer(layer)

    def export(self, cache: Cache, part: Part, into: memoryview) -> None:
        assert isinstance(cache, CostCache)
        place = part.layer, part.tensor
        if place in cache.rows:
            cache.rows[place].export(part.start, part.stop, into)
        else:
            assert part.stop == cache.tokens, "a state exists only where the latest chunk ended"
            self._content.state(place, cache.prefix_hash, into)

    def restore(self, tokens: int, parts: Iterable[tuple[Part, memoryview]]) -> CostCache:
        cache, states = self.new_cache(), dict[Place, memoryview]()
        for place, pieces in gather(self.info.layout, tokens, parts).items():
            for _, memory in pieces:
                if place in cache.rows:
                    cache.rows[place].load(memory)
                else:
                    states[place] = memory
        if tokens:
            cache.tokens, cache.prefix_hash = tokens, self._content.hash_of(states)
        return cache

    def step(self, batch: Sequence[StepInput]) -> list[StepOutput]:
        self._pace.begin()
        outputs = [self._step(each) for each in batch]
        self._pace.spend(self._config.step_s(len(batch)))
        return outputs

    def _step(self, each: StepInput) -> StepOutput:
        cache, vocab_tokens = each.cache, self._config.vocab_tokens
        assert isinstance(cache, CostCache)
        cache.append(struct.pack("<I", each.token_id))
        digest = cache.digest()
        best = int.from_bytes(digest[:8], "little") % vocab_tokens
        spread = 1 + digest[8] / 256
        logits = tuple(((best + rank) % vocab_tokens, -rank * spread) for rank in range(min(TOP_LOGITS, vocab_tokens)))
        drawn = _sampled(digest, each.sampling) % vocab_tokens if each.sampling.temperature else best
        return StepOutput(drawn, logits)


class _Pace:
    """Makes work take its simulated time: what is done meanwhile counts towards it, and what one wait oversleeps is
    taken off the next."""

    def __init__(self) -> None:
        self._due_s = self._late_s = 0.0

    def begin(self) -> None:
        self._due_s = time.monotonic() - self._late_s

    def spend(self, seconds: float) -> None:
        self._due_s += seconds
        if (rest_s := self._due_s - time.monotonic()) > 0:
            time.sleep(rest_s)
        self._late_s = min(max(time.monotonic() - self._due_s, 0.0), MAX_LATE_S)


def _sampled(digest: bytes, sampling: Sampling) -> int:
    """A draw that belongs to this sequence, at this position, with these settings."""
    settings = msgspec.msgpack.encode((sampling.seed, sampling.temperature, sampling.top_p))
    return int.from_bytes(hashlib.blake2b(digest + settings, digest_size=8).digest(), "little")
