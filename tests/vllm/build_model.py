"""Builds a tiny model with random weights: `python build_model.py FAMILY FOLDER`, in the environment that has vLLM.

The weights are spread so that the best token is best by far, and recurrent states fade slowly: an answer then shows
when rows or states are lost.
"""

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SEED, STD = 1234, 0.08
VOCABULARY = 2048
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": STD,
}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 1, "chunk_size": 64, "expand": 2}
#: As many experts for a token as there are: a router of random weights would change its mind over the last bit.
QWEN3_NEXT = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
#: Attention that looks at a few tokens and not at all of them, and is heard: else its rows would hardly show beside the
#: noise of bfloat16.
SHARP, LOUD = 2.0, 4.0


def model_of(family: str) -> transformers.PreTrainedModel:
    match family:
        case "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_hidden_layers=4, **COMMON))
        case "nemotron_h":
            kinds = ["mamba", "mlp", "mamba", "attention"]
            config = transformers.NemotronHConfig(layers_block_type=kinds, **COMMON, **MAMBA)
            return transformers.NemotronHForCausalLM(config)
        case "qwen3_next":
            return transformers.Qwen3NextForCausalLM(
                transformers.Qwen3NextConfig(num_hidden_layers=4, **COMMON, **QWEN3_NEXT)
            )
        case _:
            raise SystemExit(f"no family {family!r}")


def build(family: str, folder: Path) -> None:
    torch.manual_seed(SEED)
    model = model_of(family).to(torch.float32)
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            weights.data.uniform_(-5.0, -2.5)
        elif name.endswith("dt_bias"):
            weights.data.zero_()
        elif family == "qwen3_next" and name.endswith("q_norm.weight"):
            weights.data.fill_(SHARP)
        elif family == "qwen3_next" and name.endswith("self_attn.o_proj.weight"):
            weights.data.mul_(LOUD)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for every byte, and names for the rest: prompts and answers of these tests are token ids."""
    special = ["<|bos|>", "<|unused|>", "<|eos|>", "<|pad|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{number}>" for number in range(VOCABULARY - len(words))]
    raw = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", model_max_length=8192
    )


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
