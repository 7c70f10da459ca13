"""What the connector refuses of a server, and what it warns of, without any vLLM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from prfaas.engine.vllm.compatibility import RULES, findings
from prfaas.engine.vllm.facts import FULL, RECURRENT, Facts
from prfaas.engine.vllm.read_facts import facts_of
from prfaas.engine.vllm.rule import Verdict

REFUSED = {
    "vLLM": {"version": "0.31.4"},
    "layers of the model": {"cache_kinds": frozenset({FULL, "MLAAttentionSpec"})},
    "--runner": {"runner": "pooling"},
    "--kv-cache-dtype": {"cache_dtype": "fp8"},
    "--quantization": {"quantized_here": "fp8"},
    "--load-format": {"load_format": "dummy"},
    "--hf-overrides": {"overridden": True},
    "--tensor-parallel-size": {"tensor_parallel": 2},
    "--pipeline-parallel-size": {"pipeline_parallel": 2},
    "--data-parallel-size": {"data_parallel": 2},
    "--prefill-context-parallel-size, --decode-context-parallel-size": {"context_parallel": 2},
    "--enable-dbo, --ubatch-size": {"micro_batches": True},
    "--speculative-config": {"speculative": "ngram"},
    "--enable-lora": {"adapters": True},
    "--use-replayssm": {"replayed_states": True},
    "--kv-sharing-fast-prefill": {"shortened_prefill": True},
    "kv_role": {"role": "kv_producer"},
    "prefix caching with recurrent layers": {"cache_kinds": frozenset({FULL, RECURRENT})},
}
UNTESTED = {
    "vLLM": {"version": "0.33.0rc1"},
    "model": {"model": "LlamaForCausalLM"},
    "images, sound, video": {"multimodal": True},
    "--dtype": {"dtype": "float16"},
    "quantised weights": {"quantization": "awq"},
    "--enable-chunked-prefill": {"chunked_prefill": False},
    "--async-scheduling": {"async_scheduling": True},
    "device": {"device": "cuda"},
}
OTHERWISE = {Verdict.REFUSED: REFUSED, Verdict.UNTESTED: UNTESTED}


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.32.0+cpu", "v0.32.0.dev3+g1234"])
def test_a_server_as_tests_start_it_is_served(version: str, verdict: Verdict):
    """Neither refused nor warned of, whatever build of the series it is; nor is a hybrid without a prefix cache."""
    assert findings(Facts(version=version), verdict) == ()
    kinds = frozenset({FULL, RECURRENT})
    hybrid = Facts(version=version, model="NemotronHForCausalLM", cache_kinds=kinds, prefix_caching=False)
    assert findings(hybrid, verdict) == ()


@pytest.mark.parametrize("verdict", Verdict)
def test_every_rule_finds_what_it_is_about(verdict: Verdict):
    """And nothing else: one thing that is otherwise is one finding, which names the setting and what was found."""
    assert [rule.setting for rule in RULES if rule.verdict is verdict] == [*OTHERWISE[verdict]]
    for setting, otherwise in OTHERWISE[verdict].items():
        facts = replace(Facts(), **otherwise)
        [finding] = findings(facts, verdict)
        [found] = otherwise.values()
        assert finding.rule.setting == setting
        assert found is True or found is False or finding.found in str(sorted(found) if setting[0] == "l" else found)
        assert str(finding).startswith(f"{setting} ({finding.found}): ") and finding.rule.instead in str(finding)


def test_all_that_is_refused_is_told_at_once():
    """An operator who has mended one setting shall not find the next one minutes later."""
    found = findings(Facts(tensor_parallel=8, cache_dtype="fp8_e5m2", adapters=True), Verdict.REFUSED)
    assert {finding.found for finding in found} == {"8", "fp8_e5m2", "on"}


@pytest.mark.parametrize("version", ["", "unknown", "dev"])
def test_a_version_that_is_none_is_refused(version: str):
    """Whoever does not say what it is may be anything."""
    assert [finding.rule.setting for finding in findings(Facts(version=version), Verdict.REFUSED)] == ["vLLM"]


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


def _group(spec: object) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec)


def _config(**sections: SimpleNamespace) -> SimpleNamespace:
    """A configuration as vLLM 0.32 has it for the tests' servers."""
    there = {
        "model_config": SimpleNamespace(
            architecture="Qwen3ForCausalLM",
            dtype="torch.float32",
            runner_type="generate",
            is_multimodal_model=False,
            quantization=None,
            hf_config=SimpleNamespace(),
            hf_overrides={},
        ),
        "cache_config": SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True, async_scheduling=False),
        "load_config": SimpleNamespace(load_format="auto"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
        "lora_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**there | sections)


def test_facts_are_read_off_the_configuration():
    """As a server of one rank has it; settings that this version of vLLM does not know count as off."""
    caches = SimpleNamespace(kv_cache_groups=[_group(FullAttentionSpec(sliding_window=None))])
    assert facts_of("0.32.0", _config(), caches) == Facts(version="0.32.0")


def test_layers_are_told_apart_by_exactly_what_they_are():
    """One with a window, and one of a class that derives from ours, keep other rows; a group may have several kinds."""
    several = SimpleNamespace(kv_cache_specs={"a": MambaSpec(), "b": FullAttentionSpec(sliding_window=1024)})
    groups = [_group(FullAttentionSpec(sliding_window=None)), _group(SinkFullAttentionSpec()), _group(several)]
    kinds = facts_of("0.32.0", _config(), SimpleNamespace(kv_cache_groups=groups)).cache_kinds
    assert kinds == {FULL, RECURRENT, "SinkFullAttentionSpec", "windowed attention"}


def test_quantised_weights_are_those_of_the_folder_or_not():
    """What config.json says is part of the digest that KV is told apart by; what only the command line says is not."""
    caches = SimpleNamespace(kv_cache_groups=[])
    model = _config().model_config
    model.quantization = "fp8"
    assert facts_of("0.32.0", _config(model_config=model), caches).quantized_here == "fp8"
    model.hf_config.quantization_config = {"quant_method": "fp8"}
    facts = facts_of("0.32.0", _config(model_config=model), caches)
    assert (facts.quantization, facts.quantized_here) == ("fp8", "")
