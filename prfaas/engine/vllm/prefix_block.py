"""A block of vLLM's prefix cache, in its place on our chain of keys."""

from dataclasses import dataclass, field
from typing import Self

from prfaas.engine.vllm.kv_events import BlockHash
from prfaas.kvcache.hashing import KEY_BYTES, UNIT_BYTES, keys_after
from prfaas.request import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """`stop`: tokens up to its end. `keys`: of the units of ours that end in it; `key` of the last one that has ended
    by then, and `tail` the tokens after that. `groups`: which of the server's cache groups hold it. `whole`, `stated`:
    that the index knows its rows, and a state at its end."""

    name: BlockHash
    parent: "Block | None"
    stop: int
    keys: bytes
    key: bytes
    tail: bytes
    children: "dict[BlockHash, Block]" = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    whole: bool = False
    stated: bool = False

    @classmethod
    def root(cls, salt: bytes, key: bytes) -> Self:
        """What all prompts of a tenant stand on."""
        return cls(salt, None, 0, b"", key, b"", whole=True)

    @property
    def salt(self) -> bytes:
        """Of a root."""
        assert self.parent is None and isinstance(self.name, bytes)
        return self.name

    def add(self, name: BlockHash, tokens: bytes) -> "Block":
        """The next block, of these tokens."""
        text = self.tail + tokens
        keys = keys_after(self.key, text)
        tail = text[len(keys) // KEY_BYTES * UNIT_BYTES :]
        stop = self.stop + len(tokens) // TOKEN_BYTES
        block = self.children[name] = Block(name, self, stop, keys, keys[-KEY_BYTES:] or self.key, tail)
        return block

    @property
    def path_keys(self) -> bytes:
        """Of all units up to its end."""
        parts, block = [self.keys], self.parent
        while block is not None:
            parts.append(block.keys)
            block = block.parent
        return b"".join(reversed(parts))

    @property
    def first_path_keys(self) -> bytes:
        """Up to the first unit that ends in it."""
        keys = self.path_keys
        return keys[: len(keys) - len(self.keys) + KEY_BYTES]
