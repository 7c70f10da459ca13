"""The tokenizer of a model folder: `tokenizer.json` through the `tokenizers` library.

Where tiktoken gives the same tokens it encodes, being faster. Otherwise `encode_batch_fast` does, even for one text:
unlike `encode` it lets go of the interpreter lock, so that a long prompt in a thread does not stop the event loop, and
it computes no offsets, which nobody reads.
"""

import array
import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from prfaas.errors import ConfigError, DeadlineExceeded, InvalidRequest
from prfaas.tokenizer.chat import ChatTemplate
from prfaas.tokenizer.fast import fast_encoding
from prfaas.tokenizer.port import Message, Tool
from prfaas.tokenizer.segments import Cuts, RememberedParts, key_of, safe_tokens
from prfaas.tokenizer.spelling import spelled

#: Texts up to this many characters are encoded at once, in about a millisecond; a thread would not be worth it, nor
#: would be looking for parts of it that have been seen.
SHORT_CHARACTERS = 4096
#: How long a text may wait for its turn there and be encoded. The longest prompts take some seconds.
ASIDE_S = 60.0
#: For the tokens of parts of texts. Two million of them are some thousand long conversations.
REMEMBERED_BYTES = 16 * 2**20
#: Scripts, emoji, digits, spaces, and characters of one to four bytes.
PROBE = "The 3 quick foxes: naïve café,\t你好 世界 — Привет 🙂👍🏽\n\n  if x == 1024: return 'ok'\r\n\u00a0e\u0301 "
#: So many characters may become one before a text is cut into tokens: a letter and its marks.
NORMALIZED = 4
#: More threads would only compete with the event loop of the same process.
ASIDE_THREADS = 2


class TextTokenizer:
    """Implements `port.Tokenizer`. Only `encode` and what gives text may be called from several threads."""

    def __init__(
        self, tokenizer: Any, template: ChatTemplate | None, remembered_bytes: int = REMEMBERED_BYTES, digest: str = ""
    ) -> None:
        self._tokenizer, self._template, self.digest = tokenizer, template, digest
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        #: One above the highest id: ids may have gaps.
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._vocabulary_size = 1 + max(vocabulary.values())
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._bytes_of = _BytesOf(self) if repr(tokenizer.decoder).startswith("ByteLevel(") else None
        written = template.source if template is not None else ""
        self._cuts = Cuts([token for token in safe_tokens(list(added.values())) if token in written])
        self.remembered = RememberedParts(remembered_bytes)
        self._fast = fast_encoding(tokenizer.to_str())
        self._leading = _leading(tokenizer)
        #: What a token stands for in a text, at most; not known of a tokenizer that may leave something out.
        self._most_characters = NORMALIZED * max(map(len, vocabulary)) if self._fast is not None else None
        self._aside = ThreadPoolExecutor(ASIDE_THREADS, thread_name_prefix="tokenizer")

    @property
    def bytes_of(self) -> Mapping[int, bytes] | None:
        return self._bytes_of

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions")
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        [packed] = self._encode([text], add_special_tokens=add_special_tokens)
        return packed

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[bytes]:
        if self._fast is not None and (self._leading is not None or not add_special_tokens):
            leading = pack(self._leading or []) if add_special_tokens else b""
            fast = [packed for text in texts if (packed := self._fast.encode(text)) is not None]
            if len(fast) == len(texts):
                return [leading + packed for packed in fast]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [pack(encoding.ids) for encoding in encodings]

    def fewest_tokens(self, text: str) -> int:
        return 0 if self._most_characters is None else -(-len(text) // self._most_characters)

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Of a text that gets no special tokens, only the parts that are not remembered are encoded."""
        if len(text) <= SHORT_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            [packed] = await self._encode_aside([text], add_special_tokens=True)
            return packed
        parts = list(self._cuts.parts(text))
        keys = [key_of(part) for part in parts]
        known = {key: found for key in keys if (found := self.remembered.find(key)) is not None}
        fresh = {key: part for key, part in zip(keys, parts, strict=True) if key not in known}
        if fresh:
            encoded = await self._encode_aside(list(fresh.values()), add_special_tokens=False)
            learned = dict(zip(fresh, encoded, strict=True))
            self.remembered.learn(learned)
            known |= learned
        return b"".join([known[key] for key in keys])

    async def _encode_aside(self, texts: list[str], *, add_special_tokens: bool) -> list[bytes]:
        if sum(map(len, texts)) <= SHORT_CHARACTERS:
            return self._encode(texts, add_special_tokens=add_special_tokens)
        encode = partial(self._encode, texts, add_special_tokens=add_special_tokens)
        encoding = asyncio.get_running_loop().run_in_executor(self._aside, encode)
        limit = asyncio.timeout(ASIDE_S)
        try:
            async with limit:
                return await encoding
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("tokenize", ASIDE_S) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def has_text(self, token_id: int) -> bool:
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None

    def token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        special = self._special.get(token_id)
        return special.encode() if special is not None else spelled(self.token(token_id), byte_level=self._byte_level)

    async def test(self) -> None:
        """ConfigError unless all ways to encode that requests take give the ids of the plain one, and those the text
        back."""
        text = PROBE * (1 + SHORT_CHARACTERS // len(PROBE))
        if self._template is not None:
            text = self.render([{"role": "user", "content": text}] * 2)
        for special in (False, True):
            plain = pack(self._tokenizer.encode(text, add_special_tokens=special).ids)
            for ids in (
                self.encode(text, add_special_tokens=special),
                await self.encode_aside(text, add_special_tokens=special),
                await self.encode_aside(text, add_special_tokens=special),  # remembered
            ):
                if ids != plain:
                    raise ConfigError("router.model_dir", "the tokenizer gives different ids for the same text")

    def close(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)


class _BytesOf(dict[int, bytes]):
    """The bytes of the ids that have come up."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        found = tokenizer.token_bytes(token_id) if tokenizer.has_text(token_id) else b""
        if token_id < tokenizer.vocabulary_size:
            self[token_id] = found
        return found


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """The tokenizer and chat template of a model folder."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("model", f"{model_dir} holds no tokenizer.json")
    try:
        content = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(content).hexdigest()
    return TextTokenizer(tokenizer, _load_template(model_dir), digest=digest)


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


def _leading(tokenizer: Any) -> list[int] | None:
    """The special tokens that every text gets in front; None where they are not only there."""
    found = []
    for text in ("", "a", "b c"):
        plain, whole = (tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True))
        if whole[len(whole) - len(plain) :] != plain:
            return None
        found.append(whole[: len(whole) - len(plain)])
    return found[0] if found.count(found[0]) == len(found) else None


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
