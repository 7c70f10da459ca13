"""The salt of a tenant as vLLM hashes it with a prompt: equal prompts of two tenants share nothing in its cache, and
what it says of its cache names the tenant's keys again."""

from collections.abc import Sequence
from typing import Any

_OURS = "prfaas:"


def cache_salt(salt: bytes) -> str:
    """For a request to the server."""
    return _OURS + salt.hex()


def alone(attempt: str) -> str:
    """For a request that is to find nothing in the cache and leave nothing there that another one finds."""
    return f"alone:{attempt}"


def salt_in(extra_keys: Sequence[Any] | None) -> bytes | None:
    """Of a prompt's first block; None when it is not a tenant of ours alone that its hash is made with."""
    if extra_keys is None or len(extra_keys) != 1 or not isinstance(extra_keys[0], str):
        return None
    ours, found, salt = extra_keys[0].partition(_OURS)
    if ours or not found:
        return None
    try:
        return bytes.fromhex(salt)
    except ValueError:
        return None
