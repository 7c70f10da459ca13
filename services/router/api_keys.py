"""The file of API keys: which tenant a key is of, what it is good for, and what the tenant may use.

Keys are made here, of 256 random bits, so nobody can guess one and a slow hash would protect nothing: it would only let
anyone make the router work by sending wrong keys. So a key is kept as its SHA-256 behind the file's salt, which keeps
hashes of one file from meaning anything for another, and a key is found by its hash.
"""

import hashlib
import secrets
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from prfaas.errors import ConfigError
from prfaas.scheduling.allowance import Quota
from prfaas.scheduling.turns import Priority

PREFIX = "sk-prfaas-"
#: Longer than any key of ours.
MAX_KEY = 256

_Limit = Annotated[float, Meta(ge=1, le=1e12)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits that are absent do not limit. They are the cluster's: its routers share them."""

    requests_per_min: _Limit | None = None
    #: Of prompts and of what may be generated.
    tokens_per_min: _Limit | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    priority: Priority = Priority.NORMAL
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    #: For requests that do not say one themselves.
    ttft_deadline_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None

    def quota(self, parts: int) -> Quota:
        return Quota(
            requests_per_min=self.requests_per_min,
            tokens_per_min=self.tokens_per_min,
            max_concurrent=self.max_concurrent,
            weight=self.weight,
            parts=parts,
        )


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    tenant: str
    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    #: Absent: all models.
    models: tuple[str, ...] | None = None
    note: str = ""
    created: str = ""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    salt: Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){16,64}$")]
    tenants: dict[_Name, TenantRecord] = {}
    keys: dict[_Name, KeyRecord] = {}


class KeySet:
    """The keys of one file as it was read."""

    def __init__(self, file: KeyFile) -> None:
        self._salt = bytes.fromhex(file.salt)
        self._ids = {record.hash: key_id for key_id, record in file.keys.items()}
        self._file = file

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, key: str) -> tuple[str, KeyRecord, TenantRecord] | None:
        if len(key) > MAX_KEY or (key_id := self._ids.get(_hashed(self._salt, key))) is None:
            return None
        record = self._file.keys[key_id]
        return key_id, record, self._file.tenants[record.tenant]


def read(path: Path) -> KeyFile:
    """Raises ConfigError, with the place of what is wrong."""
    try:
        return parse(path, path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "is not UTF-8") from error


def parse(path: Path, text: str) -> KeyFile:
    """TOML, if the name ends so, else JSON."""
    try:
        if is_toml(path):
            file = msgspec.convert(tomllib.loads(text), KeyFile)
        else:
            file = msgspec.json.decode(text, type=KeyFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), str(error)) from error
    for key_id, record in file.keys.items():
        if record.tenant not in file.tenants:
            raise ConfigError(str(path), f"keys.{key_id}.tenant: {record.tenant!r} is not among the tenants")
    if len({record.hash for record in file.keys.values()}) < len(file.keys):
        raise ConfigError(str(path), "keys: the same hash twice")
    return file


def is_toml(path: Path) -> bool:
    return path.suffix == ".toml"


def empty() -> KeyFile:
    return KeyFile(salt=secrets.token_hex(16))


def new_key(file: KeyFile) -> tuple[str, str, str]:
    """Id, key, and its hash for this file."""
    key = PREFIX + secrets.token_urlsafe(32)
    return secrets.token_hex(4), key, _hashed(bytes.fromhex(file.salt), key)


def _hashed(salt: bytes, key: str) -> str:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogateescape")).hexdigest()
