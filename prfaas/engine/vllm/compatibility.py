"""Which vLLM servers the connector serves: for each setting that matters what works, is refused, or is untested.

The connector asks before it does anything else, and `docs/reference/vllm-compatibility.md` is made of the same rows.
What is refused could give wrong answers, or none. What is untested works as far as its code can be read; the log says
so. The names of settings are those of vLLM's command line.
"""

import re
from collections.abc import Container

from prfaas.engine.vllm.facts import FULL, RECURRENT, TESTED_SERIES, Facts
from prfaas.engine.vllm.rule import Finding, Rule, Verdict

#: By the name of the model's class in vLLM, with random weights. In float32 their tokens are those of one server alone,
#: in bfloat16 their probabilities are within a tolerance of its.
TESTED_MODELS = ("Qwen3ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM")
TESTED_DTYPES = ("float32", "bfloat16")
#: Whose rows are the model's own numbers, and not scaled ones.
PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")


def findings(facts: Facts, verdict: Verdict) -> tuple[Finding, ...]:
    """All that this server has of what is refused, or of what is untested."""
    found = ((rule, rule.otherwise(facts)) for rule in RULES if rule.verdict is verdict)
    return tuple(Finding(rule, what) for rule, what in found if what is not None)


def series(version: str) -> tuple[int, ...]:
    """Major and minor number; empty when it has none."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def too_old(version: str) -> str | None:
    return version or "no version" if series(version) < TESTED_SERIES else None


def too_new(version: str) -> str | None:
    return version if series(version) > TESTED_SERIES else None


def _more_than_one(number: int) -> str | None:
    return str(number) if number > 1 else None


def _not_among(word: str, words: Container[str]) -> str | None:
    return word if word not in words else None


def _on(flag: bool) -> str | None:
    return "on" if flag else None


def _other_kinds(facts: Facts) -> str | None:
    return ", ".join(sorted(facts.cache_kinds - {FULL, RECURRENT})) or None


def _recurrent_with_prefixes(facts: Facts) -> str | None:
    return _on(facts.prefix_caching and RECURRENT in facts.cache_kinds)


_NO_SETTING = "no setting helps: serve this model without prfaas"
_ONE_EACH = "set it to 1 and start a worker for each accelerator"
_LEAVE_OUT = "leave it out"
_WATCH = "compare answers with those of one server alone before you rely on it"
_REFUSED, _UNTESTED = Verdict.REFUSED, Verdict.UNTESTED
_SERIES = ".".join(map(str, TESTED_SERIES))

RULES = (
    Rule(
        "vLLM",
        f"{_SERIES} or newer",
        _REFUSED,
        lambda facts: too_old(facts.version),
        "older interfaces for connectors lack parts that ours needs (`get_transfer_results`, `SupportsHMA`)",
        f"name the Python of a vLLM {_SERIES}",
        "worker.vllm_python",
    ),
    Rule(
        "vLLM",
        f"{_SERIES}.x",
        _UNTESTED,
        lambda facts: too_new(facts.version),
        "its interface for connectors is experimental and may have changed",
        f"name the Python of a vLLM {_SERIES}, or run `make test-vllm` with this one",
        "worker.vllm_python",
    ),
    Rule(
        "layers of the model",
        "full attention, recurrent (Mamba, gated delta nets, ...)",
        _REFUSED,
        _other_kinds,
        "rows of latent, sliding-window, chunked and cross attention are not carried (DeepSeek-V3, Kimi Linear,"
        " Gemma 3, gpt-oss, Llama 4, ...)",
        _NO_SETTING,
        "worker.model_dir",
    ),
    Rule(
        "model",
        ", ".join(TESTED_MODELS),
        _UNTESTED,
        lambda facts: _not_among(facts.model, TESTED_MODELS),
        "no test runs this model",
        _WATCH,
        "worker.model_dir",
    ),
    Rule(
        "images, sound, video",
        "models of text",
        _UNTESTED,
        lambda facts: _on(facts.multimodal),
        "requests are text; how this model numbers its positions is untested",
        _WATCH,
        "worker.model_dir",
    ),
    Rule(
        "--runner",
        "generate",
        _REFUSED,
        lambda facts: _not_among(facts.runner, ("generate",)),
        "a server that does not generate tokens decodes nothing",
        "set it to generate",
    ),
    Rule(
        "--dtype",
        ", ".join(TESTED_DTYPES),
        _UNTESTED,
        lambda facts: _not_among(facts.dtype, TESTED_DTYPES),
        "no test runs it; tokens are compared exactly in float32 only, since narrower numbers have near-ties that the"
        " order of sums decides",
        _WATCH,
    ),
    Rule(
        "--kv-cache-dtype",
        ", ".join(PLAIN_CACHES),
        _REFUSED,
        lambda facts: _not_among(facts.cache_dtype, PLAIN_CACHES),
        "the scales of a quantised cache are not carried",
        "set it to auto",
    ),
    Rule(
        "--quantization",
        "as the model's own config.json says, or none",
        _REFUSED,
        lambda facts: facts.quantized_here or None,
        "weights that are quantised while they are loaded make other KV than those of the folder, by which KV is told"
        " apart",
        "leave it out, or use a folder that is quantised already",
    ),
    Rule(
        "quantised weights",
        "none",
        _UNTESTED,
        lambda facts: facts.quantization or None,
        "no test runs a quantised model",
        _WATCH,
        "worker.model_dir",
    ),
    Rule(
        "--load-format",
        "auto, safetensors",
        _REFUSED,
        lambda facts: _not_among(facts.load_format, ("auto", "hf", "safetensors")),
        "KV is told apart by a digest of the folder's *.safetensors, and other weights would pass for these",
        "set it to auto",
    ),
    Rule(
        "--hf-overrides",
        "none",
        _REFUSED,
        lambda facts: _on(facts.overridden),
        "KV is told apart by a digest of the folder's config.json, and other settings would pass for these",
        "change config.json in all folders instead",
    ),
    Rule(
        "--tensor-parallel-size",
        "1",
        _REFUSED,
        lambda facts: _more_than_one(facts.tensor_parallel),
        "each rank has a part of every row, and nothing puts them together",
        _ONE_EACH,
    ),
    Rule(
        "--pipeline-parallel-size",
        "1",
        _REFUSED,
        lambda facts: _more_than_one(facts.pipeline_parallel),
        "each rank has a part of the layers, and nothing puts them together",
        _ONE_EACH,
    ),
    Rule(
        "--data-parallel-size",
        "1",
        _REFUSED,
        lambda facts: _more_than_one(facts.data_parallel),
        "a server is one engine with one cache",
        _ONE_EACH,
    ),
    Rule(
        "--prefill-context-parallel-size, --decode-context-parallel-size",
        "1",
        _REFUSED,
        lambda facts: _more_than_one(facts.context_parallel),
        "each rank has a part of the tokens, and nothing puts them together",
        _ONE_EACH,
    ),
    Rule(
        "--enable-dbo, --ubatch-size",
        "off",
        _REFUSED,
        lambda facts: _on(facts.micro_batches),
        "rows are copied out when a layer has computed the whole step, not a part of its batch",
        _LEAVE_OUT,
    ),
    Rule(
        "--speculative-config",
        "none",
        _REFUSED,
        lambda facts: facts.speculative or None,
        "the cache of a draft model is not carried, and states are several steps apart",
        _LEAVE_OUT,
    ),
    Rule(
        "--enable-lora",
        "off",
        _REFUSED,
        lambda facts: _on(facts.adapters),
        "KV of an adapter would pass for that of the model",
        "leave it out, and serve a folder with the adapter merged into its weights",
    ),
    Rule(
        "--use-replayssm",
        "off",
        _REFUSED,
        lambda facts: _on(facts.replayed_states),
        "a page does not hold the state, but an older one and inputs since then",
        _LEAVE_OUT,
    ),
    Rule(
        "--kv-sharing-fast-prefill",
        "off",
        _REFUSED,
        lambda facts: _on(facts.shortened_prefill),
        "layers skip tokens of the prompt",
        _LEAVE_OUT,
    ),
    Rule(
        "kv_role",
        "kv_both",
        _REFUSED,
        lambda facts: _not_among(facts.role, ("kv_both",)),
        "a worker's role changes without a restart of its server",
        "set it to kv_both",
    ),
    Rule(
        "prefix caching with recurrent layers",
        "off",
        _REFUSED,
        _recurrent_with_prefixes,
        f"vLLM {_SERIES} keeps states at the ends of blocks then, and on a CPU it answers otherwise from them, also by"
        " itself (Qwen3-Next), or ends (Nemotron-H)",
        "set --no-enable-prefix-caching",
    ),
    Rule(
        "--enable-chunked-prefill",
        "on",
        _UNTESTED,
        lambda facts: None if facts.chunked_prefill else "off",
        "a whole prompt is one step, and nothing of it is sent before its first layer is done",
        "leave it on",
    ),
    Rule(
        "--async-scheduling",
        "off",
        _UNTESTED,
        lambda facts: _on(facts.async_scheduling),
        "the scheduler is a step ahead of what the connector has copied",
        "set --no-async-scheduling",
    ),
    Rule(
        "device",
        "cpu",
        _UNTESTED,
        lambda facts: _not_among(facts.device, ("cpu",)),
        "tests run on CPUs",
        _WATCH,
    ),
)
