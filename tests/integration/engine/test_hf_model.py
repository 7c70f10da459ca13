"""The tiny models and what the engine says about them."""

import hashlib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from prfaas.engine.hf import HfEngine
from prfaas.engine.loading import load_engine
from prfaas.engine.tiny import build_tiny

#: The weights whose sensitivity to damage was measured. Another generator of torch would draw others.
MEASURED = {"kimi_linear": "4808aba4ac807e99", "qwen3_next": "ea46d728261d2579"}
BYTES_PER_TOKEN = {"kimi_linear": 384, "qwen3_next": 1024, "qwen3_next_moe": 1024, "qwen3": 2048}
STATE_BYTES = {"kimi_linear": 22528, "qwen3_next": 40960, "qwen3_next_moe": 40960, "qwen3": 0}


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("family", MEASURED)
def test_the_weights_are_those_that_were_measured(family: str, tmp_path: Path) -> None:
    """A tiny model notices damage because of the weights it has; these are the ones."""
    build_tiny(tmp_path, family)
    state = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    assert digest.startswith(MEASURED[family])


def test_a_model_is_built_the_same_everywhere(engine: HfEngine, model_dir: Path, tmp_path: Path) -> None:
    """Every file, and so the namespace, is the same in each folder; another seed is another model."""
    build_tiny(tmp_path / "again", model_dir.name)
    build_tiny(tmp_path / "other", model_dir.name, seed=99)
    assert files(tmp_path / "again") == files(model_dir)
    assert load_engine(tmp_path / "again").info.namespace == engine.info.namespace
    assert load_engine(tmp_path / "other").info.namespace != engine.info.namespace


def test_the_engine_describes_its_model(engine: HfEngine, model_dir: Path) -> None:
    """Sizes come from the configuration: b bytes per token and a bytes of state."""
    info = engine.info
    assert info.layout.bytes_per_token == BYTES_PER_TOKEN[model_dir.name]
    assert info.layout.state_bytes == STATE_BYTES[model_dir.name]
    assert (info.model, info.chunk_tokens, info.max_context_tokens) == (model_dir.name, 256, 16384)
    assert (info.vocab_tokens, info.eos_token_ids) == (512, ())


@pytest.mark.parametrize(("configured", "expected"), [(2, (2,)), ([2, 0], (2, 0))])
def test_end_tokens_come_from_the_model_folder(configured: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    """One id or several, as generation_config.json has them."""
    build_tiny(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    model.generation_config.eos_token_id = configured
    model.save_pretrained(tmp_path)
    assert load_engine(tmp_path).info.eos_token_ids == expected


def test_the_folder_is_an_ordinary_one(model_dir: Path) -> None:
    """Other tools of the ecosystem read it: the tokenizer applies its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == 512
