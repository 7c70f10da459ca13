"""The model folder of the benchmark: a byte-level tokenizer of a real vocabulary's size, which both ends use.

Its words are cut by Llama 3's pattern, so that the router takes the same way to its tokens as with that model. It is
trained on the sources of this Python: there is nothing to fetch, and the same Python gives the same folder.
"""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from prfaas.tokenizer.fast import LLAMA3
from prfaas.tokenizer.text import TextTokenizer

#: The name under which all routers of the harness serve their model.
NAME = "mock"
VOCABULARY = 32_000
CORPUS_CHARACTERS = 12_000_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_folder(build: Path) -> Path:
    """Made when it is not there yet."""
    folder = build / NAME
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def plain_words(tokenizer: TextTokenizer, count: int = 4096) -> list[int]:
    """Tokens that are a space and some letters: any of them after any other is text, and tells which it was."""
    words = [
        token_id
        for token_id in range(tokenizer.vocabulary_size)
        if (spelled := tokenizer.token_bytes(token_id)).startswith(b" ") and spelled[1:].isalpha() and spelled.isascii()
    ]
    assert len(words) >= count, f"the vocabulary has only {len(words)} plain words"
    return words[:count]


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _corpus() -> Iterator[str]:
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and taken < CORPUS_CHARACTERS:
            text = path.read_text("utf-8", errors="replace")
            taken += len(text)
            yield text
