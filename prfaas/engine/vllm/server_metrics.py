"""What a vLLM server counts of itself, read off its /metrics."""

import re

from prfaas.engine.messages import ServerLoad

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def read(page: bytes) -> ServerLoad:
    """Of all engines of the server together. What it does not count is 0. Raises ValueError."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page.decode("utf-8", "replace")):
        found.setdefault(name, []).append(float(value))

    def whole(name: str) -> int:
        return round(sum(found.get(f"vllm:{name}", ())))

    return ServerLoad(
        running=whole("num_requests_running"),
        waiting=whole("num_requests_waiting"),
        kv_usage_ratio=max(found.get("vllm:kv_cache_usage_perc", (0.0,))),
        prompt_tokens_total=whole("prompt_tokens_total"),
        generated_tokens_total=whole("generation_tokens_total"),
        prefix_queried_tokens_total=whole("prefix_cache_queries_total"),
        prefix_hit_tokens_total=whole("prefix_cache_hits_total"),
    )
