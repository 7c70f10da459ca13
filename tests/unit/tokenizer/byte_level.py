"""A small byte-level BPE tokenizer in a model folder, as real models ship it."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
SPECIAL = (BOS, EOS, "<|im_start|>", "<|im_end|>")
#: Token ids 0 to 3, in the order of the trainer's special tokens.
BOS_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ("the quick brown fox jumps over the lazy dog " * 20, "Grüße, señor - naïve café 你好世界 🙂👍🏽 " * 20)


def write_model_dir(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def plain(text: str) -> bool:
    """Without special tokens, which have no text of their own."""
    return not any(special in text for special in SPECIAL)
