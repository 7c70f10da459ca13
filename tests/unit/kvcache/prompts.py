"""Prompts as words: each letter is one hash unit, and equal beginnings have equal keys."""

import hashlib

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES


def keys(word: str) -> bytes:
    return b"".join(hashlib.sha256(prefix.encode()).digest()[:KEY_BYTES] for prefix in prefixes(word))


def prefixes(word: str) -> list[str]:
    return [word[:end] for end in range(1, len(word) + 1)]


def tokens(units: int) -> int:
    return units * HASH_UNIT_TOKENS
