"""What a vLLM server is, as far as it matters to the connector; `read_facts` reads it, `compatibility` judges it."""

from dataclasses import dataclass

#: vLLM calls its interface for connectors experimental. This series has what ours needs; tests run with it.
TESTED_SERIES = (0, 32)
#: Kinds of cache layers.
FULL, RECURRENT = "full attention", "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of a server, read off its configuration. The defaults are those of a server as tests start it."""

    version: str = ".".join(map(str, (*TESTED_SERIES, 0)))
    model: str = "Qwen3ForCausalLM"
    device: str = "cpu"
    dtype: str = "float32"
    cache_kinds: frozenset[str] = frozenset({FULL})
    cache_dtype: str = "auto"
    runner: str = "generate"
    multimodal: bool = False
    load_format: str = "auto"
    overridden: bool = False
    #: A method that shows in the model's own configuration, and one that does not.
    quantization: str = ""
    quantized_here: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    micro_batches: bool = False
    speculative: str = ""
    adapters: bool = False
    prefix_caching: bool = True
    chunked_prefill: bool = True
    async_scheduling: bool = False
    replayed_states: bool = False
    shortened_prefill: bool = False
    role: str = "kv_both"
