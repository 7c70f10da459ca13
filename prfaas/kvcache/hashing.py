"""Keys of prompt prefixes: a chain of sha256 over units of 64 tokens (R11, R13).

The key of a unit names everything before it as well: the namespace, the tenant's salt, all earlier units and its own
tokens. So equal keys mean equal prefixes of the same model and the same tenant, and a prefix of a prompt has a prefix
of its keys. Only complete units have keys; the tail of a prompt is never shared. Every process computes the same keys:
the built-in `hash()` has no part in them.
"""

import hashlib
import hmac

from prfaas.request import TOKEN_BYTES

HASH_UNIT_TOKENS = 64
KEY_BYTES = 16

UNIT_BYTES = HASH_UNIT_TOKENS * TOKEN_BYTES


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    """What keeps one tenant's keys apart from all others'. Nobody without the secret can compute a key."""
    return hmac.digest(cluster_secret, tenant.encode(), "sha256")


def unit_keys(prompt: bytes, namespace: str, salt: bytes) -> bytes:
    """The keys of all complete units of `prompt` (packed uint32 token ids), 16 bytes each, joined."""
    return keys_after(root_key(namespace, salt), prompt)


def keys_after(key: bytes, tokens: bytes) -> bytes:
    """The keys of all complete units of `tokens` where they follow on the unit with this key."""
    keys = bytearray()
    for start in range(0, len(tokens) - UNIT_BYTES + 1, UNIT_BYTES):
        # The parent is the key itself rather than a longer digest: whoever holds a key can continue the chain.
        key = hashlib.sha256(key + tokens[start : start + UNIT_BYTES]).digest()[:KEY_BYTES]
        keys += key
    return bytes(keys)


def root_key(namespace: str, salt: bytes) -> bytes:
    """The parent of the first unit. Each field is hashed by itself, so that no two pairs of fields run together."""
    fields = (hashlib.sha256(field).digest() for field in (namespace.encode(), salt))
    return hashlib.sha256(b"prfaas prefix".join(fields)).digest()[:KEY_BYTES]
