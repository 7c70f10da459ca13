"""What a vLLM server counts of itself, and what of that are the requests of others."""

import asyncio
from pathlib import Path

import pytest

from prfaas.engine.messages import Event, Prefill, ServerLoad
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.completions import Usage, address_of
from prfaas.engine.vllm.server_metrics import read

#: As vLLM 0.32 writes it.
PAGE = b"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="model"} 3.0
vllm:num_requests_running{engine="1",model_name="model"} 2.0
vllm:num_requests_waiting{engine="0",model_name="model"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="model",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="model"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="model"} 1.3e+04
vllm:prompt_tokens_created{engine="0",model_name="model"} 1.79e+09
vllm:generation_tokens_total{engine="0",model_name="a name of {braces}"} 48.0
vllm:prefix_cache_queries_total{engine="0",model_name="model"} 5000.0
vllm:prefix_cache_hits_total{engine="0",model_name="model"} 1280.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="model"} 7.0
python_gc_objects_collected_total{generation="0"} 12.0
"""
LOAD = ServerLoad(
    running=5,
    waiting=1,
    kv_usage_ratio=0.5,
    prompt_tokens_total=13_000,
    generated_tokens_total=48,
    prefix_queried_tokens_total=5000,
    prefix_hit_tokens_total=1280,
)


def test_a_page_is_read():
    """All engines of the server together; of memory the fullest counts."""
    assert read(PAGE) == LOAD
    assert read(b"") == ServerLoad(
        running=0,
        waiting=0,
        kv_usage_ratio=0.0,
        prompt_tokens_total=0,
        generated_tokens_total=0,
        prefix_queried_tokens_total=0,
        prefix_hit_tokens_total=0,
    )


async def test_what_the_server_has_beyond_ours_is_of_others():
    """Counted by whichever of our numbers, before and after the server was asked, is larger: a request of ours that has
    just ended is nobody else's."""
    said = list[Event]()
    adapter = Adapter(Path("/nowhere"), 1 << 20, said.append)
    adapter.counted(LOAD, before=0)
    assert (adapter.load().others_running, adapter.load().others_waiting) == (5, 1)
    assert adapter.load().server == LOAD
    adapter.counted(LOAD, before=4)
    assert (adapter.load().others_running, adapter.load().others_waiting) == (2, 0)
    adapter.counted(LOAD, before=9)
    assert (adapter.load().others_running, adapter.load().others_waiting) == (0, 0)
    adapter.handle(Prefill(attempt="a", prompt=bytes(8), stop=0, ends=()))
    assert adapter.in_hand == 1
    adapter.counted(LOAD, before=0)
    assert (adapter.load().others_running, adapter.load().others_waiting) == (5, 0)
    adapter.counted(None, before=0)
    assert (adapter.load().others_running, adapter.load().server) == (0, None)
    await asyncio.sleep(0)


def test_a_server_that_gives_no_details_says_nothing_of_what_was_cached():
    assert Usage(prompt_tokens=7).cached_tokens is None


@pytest.mark.parametrize("text", ["", "nowhere", "https://host:8000", "http://", "http://host:8000/v1", "host:8000"])
def test_an_address_that_cannot_be_used_is_refused(text: str):
    with pytest.raises(ValueError, match="neither"):
        address_of(text)


def test_addresses_are_sockets_or_ports():
    assert address_of("/run/vllm.sock") == Path("/run/vllm.sock")
    assert address_of("http://127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert address_of("http://host") == ("host", 80)
