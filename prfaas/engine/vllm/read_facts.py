"""The facts of a vLLM server that its compatibility depends on, read off its configuration inside of it.

What a version of vLLM does not have a setting for, it does not do.
"""

from collections.abc import Iterator
from typing import Any

from prfaas.engine.vllm.facts import FULL, RECURRENT, Facts

#: Exactly these: what derives from them keeps its rows in another way.
KINDS = {"FullAttentionSpec": FULL, "MambaSpec": RECURRENT}


def facts_of(version: str, vllm_config: Any, kv_cache_config: Any) -> Facts:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    method, own = model.quantization or "", _own_quantization(model.hf_config)
    return Facts(
        version=version,
        model=model.architecture,
        device=str(vllm_config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_kinds=frozenset(_kinds(kv_cache_config)),
        cache_dtype=cache.cache_dtype,
        runner=model.runner_type,
        multimodal=model.is_multimodal_model,
        load_format=str(vllm_config.load_config.load_format),
        overridden=bool(model.hf_overrides),
        quantization=method if own else "",
        quantized_here="" if own else method,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        context_parallel=max(
            getattr(parallel, "prefill_context_parallel_size", 1), getattr(parallel, "decode_context_parallel_size", 1)
        ),
        micro_batches=_has(parallel, "enable_dbo") or getattr(parallel, "ubatch_size", 0) > 1,
        speculative=_speculative(vllm_config.speculative_config),
        adapters=vllm_config.lora_config is not None,
        prefix_caching=bool(cache.enable_prefix_caching),
        chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
        async_scheduling=_has(vllm_config.scheduler_config, "async_scheduling"),
        replayed_states=_has(cache, "use_replayssm"),
        shortened_prefill=_has(cache, "kv_sharing_fast_prefill"),
        role=vllm_config.kv_transfer_config.kv_role,
    )


def _own_quantization(settings: Any) -> bool:
    return any(getattr(settings, name, None) for name in ("quantization_config", "compression_config"))


def _has(section: Any, name: str) -> bool:
    return bool(getattr(section, name, False))


def _speculative(settings: Any) -> str:
    return "" if settings is None else str(getattr(settings, "method", None) or "on")


def _kinds(kv_cache_config: Any) -> Iterator[str]:
    for group in kv_cache_config.kv_cache_groups:
        # A group may have a specification for each of its layers.
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {}).values() or (group.kv_cache_spec,):
            yield _kind(spec)


def _kind(spec: Any) -> str:
    windows = ("sliding_window", "attention_chunk_size")
    if any(getattr(spec, window, None) is not None for window in windows):
        return "windowed attention"
    return KINDS.get(type(spec).__name__, type(spec).__name__)
