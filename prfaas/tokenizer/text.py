"""The tokenizer of a model folder: `tokenizer.json` through the `tokenizers` library.

`encode_batch_fast` is used even for one text: unlike `encode` it lets go of the interpreter lock, so that a long prompt
in a thread does not stop the event loop, and it computes no offsets, which nobody reads.
"""

import array
import asyncio
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.tokenizer.chat import ChatTemplate
from prfaas.tokenizer.port import Message

#: Texts up to this many characters are encoded at once, in about a millisecond; a thread would not be worth it.
ASIDE_CHARACTERS = 4096
#: More threads would only compete with the event loop of the same process.
ASIDE_THREADS = 2


class TextTokenizer:
    """Implements `port.Tokenizer`. Safe to use from several threads."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        #: One above the highest id: ids may have gaps.
        self._vocabulary_size: int = 1 + max(tokenizer.get_vocab().values())
        self._aside = ThreadPoolExecutor(ASIDE_THREADS, thread_name_prefix="tokenizer")

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    def render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions")
        return self._template.render(messages)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return pack(encoding.ids)

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        if len(text) <= ASIDE_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, lambda: self.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def has_text(self, token_id: int) -> bool:
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None

    def close(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """The tokenizer and chat template of a model folder."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("model", f"{model_dir} holds no tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, _load_template(model_dir))


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """Token ids from little-endian uint32."""
    token_ids = array.array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def _load_template(model_dir: Path) -> ChatTemplate | None:
    """`chat_template.jinja` wins over the template in `tokenizer_config.json`, as it does in transformers."""
    config_path, template_path = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
    config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    source = template_path.read_text("utf-8") if template_path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    return ChatTemplate(source, {name: token for name in config if (token := _special_token(name, config[name]))})


def _special_token(name: str, value: Any) -> str | None:
    """`bos_token` and its like are a string or an object with `content`."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
