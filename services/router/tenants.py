"""What keeps the cached prefixes of one tenant apart from those of all others: a salt that only routers can make.

Every router has to make the same. Without a configured secret it comes from the cluster's name: tenants are kept apart
then as well, but whoever knows the name could work a key out, and so find out by a shard's answers what others ask.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import structlog

from prfaas.config import CacheConfig
from prfaas.errors import ConfigError
from prfaas.kvcache.hashing import tenant_salt

log = structlog.get_logger()

#: Tenants whose salts are kept ready.
_KEPT = 4096


class Tenants:
    def __init__(self, secret: bytes) -> None:
        self.salt = lru_cache(_KEPT)(lambda tenant: tenant_salt(secret, tenant))

    @classmethod
    def of(cls, cache: CacheConfig, cluster: str) -> "Tenants":
        """Raises ConfigError for a secret that cannot be read or is empty."""
        if cache.secret_file:
            return cls(_read(cache.secret_file))
        if cache.secret:
            return cls(cache.secret.encode())
        if cache.enabled:
            log.warning("cached prefixes are keyed by the cluster's name: set cache.secret or cache.secret_file")
        return cls(hashlib.sha256(b"prfaas cache " + cluster.encode()).digest())


def _read(file: str) -> bytes:
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError("cache.secret_file", f"{file}: {error.strerror}") from error
    if not secret:
        raise ConfigError("cache.secret_file", f"{file} is empty")
    return secret
