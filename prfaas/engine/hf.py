"""The embedded reference engine: transformers models on CPU, one thread, one sequence at a time.

Sequences are never batched, so the bits of one depend only on its own calls: whoever prefills at the same chunk ends
and decodes token by token gets the same logits, in this process or after a transfer. Import only in an engine process.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prfaas.cluster import LOGPROBS, SEEDED_DRAWS, Namespace
from prfaas.engine import sampling
from prfaas.engine.fingerprint import tokenizer_digest, weights_digest
from prfaas.engine.gathering import gather
from prfaas.engine.hf_cache import HfCache
from prfaas.engine.hf_layout import layout_of
from prfaas.engine.port import TOP_LOGITS, Cache, EngineInfo, LayerHook, StepInput, StepOutput
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import KvLayout, Part, TensorKind, TensorSpec, namespace_digest

CHUNK_TOKENS = 256
DTYPE = "float32"

#: Kimi's reference kernel builds [chunk, chunk, width] tensors: twice as fast with 16 as with its default 64.
KERNEL_ARGUMENTS = {"kimi_linear": {"chunk_size": 16}}


class HfEngine:
    """The engine port over a local model folder in the Hugging Face format."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, local_files_only=True, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        self._config = self._model.config
        self._kernel_arguments = KERNEL_ARGUMENTS.get(self._config.model_type, {})
        self.info = self._describe(model_dir)

    def new_cache(self) -> HfCache:
        return HfCache(self._config)

    def prefill(self, cache: Cache, chunk: bytes, on_layer: LayerHook | None) -> None:
        ids = torch.from_numpy(np.frombuffer(chunk, "<u4").astype(np.int64))[None]
        with self._hooked(on_layer):
            self._forward(self._model.model, cache, ids)

    def export(self, cache: Cache, part: Part, into: memoryview) -> None:
        assert isinstance(cache, HfCache)
        if self._spec(part).kind is TensorKind.TOKENS:
            source = cache.rows(part.layer, part.tensor, part.start, part.stop)
        else:
            assert part.stop == cache.tokens, "a state exists only where the last forward ended"
            source = cache.state(part.layer, part.tensor)
        torch.frombuffer(into, dtype=source.dtype).view(source.shape).copy_(source)

    def restore(self, tokens: int, parts: Iterable[tuple[Part, memoryview]]) -> HfCache:
        layers: defaultdict[int, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        for (layer, number), pieces in gather(self.info.layout, tokens, parts).items():
            spec = self.info.layout.layers[layer][number]
            whole = (-1, *spec.shape) if spec.kind is TensorKind.TOKENS else spec.shape
            dtype = getattr(torch, spec.dtype)
            layers[layer][number] = [torch.frombuffer(memory, dtype=dtype).view(whole) for _, memory in pieces]
        cache = self.new_cache()
        with torch.inference_mode():
            for layer, tensors in layers.items():
                cache.load_layer(layer, tensors)
        cache.tokens = tokens
        return cache

    def step(self, batch: Sequence[StepInput]) -> list[StepOutput]:
        return [self._step(each) for each in batch]

    def _step(self, each: StepInput) -> StepOutput:
        output = self._forward(self._model, each.cache, torch.tensor([[each.token_id]]), logits_to_keep=1)
        logits = output.logits[0, -1].float().numpy()
        token_id = sampling.draw(logits, each.sampling, position=each.cache.tokens)
        return StepOutput(token_id, sampling.best(logits, TOP_LOGITS), sampling.score(logits, token_id))

    def _forward(self, model: torch.nn.Module, cache: Cache, ids: torch.Tensor, **arguments: int) -> Any:
        """Append `ids`. Positions follow from the cache."""
        assert isinstance(cache, HfCache)
        cache.tokens += ids.shape[1]
        with torch.inference_mode():
            return model(ids, past_key_values=cache.model_cache, use_cache=True, **self._kernel_arguments, **arguments)

    @contextmanager
    def _hooked(self, on_layer: LayerHook | None) -> Iterator[None]:
        """Have `on_layer` called after each layer. Hooks live only for one chunk: a decode step never pays for them."""
        hooks = []
        try:
            if on_layer is not None:
                for number, layer in enumerate(self._model.model.layers):
                    hooks.append(layer.register_forward_hook(_after_layer(on_layer, number)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _spec(self, part: Part) -> TensorSpec:
        return self.info.layout.layers[part.layer][part.tensor]

    def _describe(self, model_dir: Path) -> EngineInfo:
        layout, namespace = identify(model_dir, self._config)
        return EngineInfo(
            model=model_dir.resolve().name,
            namespace=namespace,
            layout=layout,
            chunk_tokens=CHUNK_TOKENS,
            max_context_tokens=self._config.max_position_embeddings,
            vocab_tokens=self._config.vocab_size,
            eos_token_ids=_ids(self._model.generation_config.eos_token_id),
            capabilities=(LOGPROBS, SEEDED_DRAWS),
            tokenizer=tokenizer_digest(model_dir),
        )


def identify(model_dir: Path, config: Any) -> tuple[KvLayout, Namespace]:
    """The geometry and the namespace of the model in a folder, of which `config` is the configuration. No weights are
    loaded for that."""
    layout = layout_of(config, DTYPE)
    digest = namespace_digest(weights_digest(model_dir), tokenizer_digest(model_dir), layout, HASH_UNIT_TOKENS)
    return layout, Namespace(digest)


def _after_layer(on_layer: LayerHook, number: int) -> Callable[..., None]:
    return lambda *_: on_layer(number)


def _ids(configured: int | list[int] | None) -> tuple[int, ...]:
    match configured:
        case None:
            return ()
        case int():
            return (configured,)
        case _:
            return tuple(configured)
