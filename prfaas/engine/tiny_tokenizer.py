"""A tokenizer of exactly 512 tokens for the tiny models: 3 special tokens, 256 bytes, and merges learned from `TEXT`.

Byte-level, so that any text has an encoding and any token sequence a decoding. The text is fixed and training has no
randomness: every folder gets the same tokenizer.json.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_TOKENS = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXT = """\
A language model reads a prompt and writes an answer one token at a time. The first part of the work is called
prefill: all tokens of the prompt pass through the model together, and each layer keeps what it will need again. The
second part is called decode: one new token passes through the model at each step, and each layer looks back at what
it has kept. What the layers keep is called the cache of the sequence.

In a dense model every layer keeps keys and values for every token, so the cache grows with the length of the prompt
and soon becomes the largest thing that the machine has to store. In a hybrid model most layers keep a state of fixed
size, and only a few layers keep something for each token. The cache of a hybrid model is therefore much smaller, and
it can be sent from one place to another over an ordinary network while the next layers are still being computed.

This is why prefill can be a service. A long prompt is sent to a region where there are fast machines for it. When the
machines there have finished a layer, the blocks of that layer start on their way. When the last block has arrived and
has been checked, the decode node takes over, computes the last token of the prompt by itself, and streams the answer
to the client. A short prompt stays where it is: the time to move it would be longer than the time to compute it.

Where should the line between short and long be drawn? If it is too low, the network fills up and everything waits. If
it is too high, the fast machines have nothing to do. The scheduler watches the load of the nodes and the state of the
link, and moves the threshold whenever that lets more requests through. When the link is slow, lossy or gone, the
threshold rises until all of the work is done at home, and when the link returns the threshold comes down again.

Good software says what it does and does what it says. Keep functions short and names plain. Let errors carry their
facts. Write tests that tell one story each, and make sure that they can fail. Do not trust a number that you have not
measured. The quick brown fox jumps over the lazy dog; the five boxing wizards jump quickly. Questions, answers, lists
and code: user, assistant, system, return, import, class, number, string, true, false, 0, 1, 2, 3, 10, 100, 1000,
2024.
"""


def build_tokenizer() -> Tokenizer:
    """The tokenizer, trained afresh."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_TOKENS
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
