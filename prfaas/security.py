"""Who a process of ours is to the others, and what may be said in plain.

Every certificate carries the role of its process as a DNS name of its own, beside the names of hosts: a client checks
that what answers has the role it wants, whatever the address, and a server checks who calls. KV is encrypted with keys
that travel over the control plane, so that the one without the other protects nothing.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from ipaddress import ip_address
from typing import assert_never

from prfaas.cluster import NodeKind
from prfaas.errors import ConfigError

DOMAIN = "prfaas.internal"


class PeerRole(Enum):
    """What a certificate is for."""

    ROUTER = "router"
    PREFILL_WORKER = "prefill-worker"
    DECODE_WORKER = "decode-worker"
    CACHE_POOL = "cache-pool"
    #: The member of an etcd cluster, or the embedded store in its place.
    STORE = "store"

    @property
    def dns_name(self) -> str:
        return f"{self.value}.{DOMAIN}"


class Plane(Enum):
    """How processes of ours talk to each other: in plain, or with certificates on both sides."""

    OFF = "off"
    MTLS = "mtls"


class Protection(Enum):
    """Of KV on the wire. CRC32C notices damage; AES_GCM also keeps it from being read or changed."""

    CRC32C = "crc32c"
    AES_GCM = "aes-gcm"


class Refusal(Enum):
    """Why a server with certificates turns somebody away. HANDSHAKE: no certificate, one of another authority, or an
    expired one. ROLE: not one that may call this."""

    HANDSHAKE = "handshake"
    ROLE = "role"


def roles_in(names: Iterable[str]) -> frozenset[PeerRole]:
    """The roles among a certificate's names."""
    given = frozenset(names)
    return frozenset(role for role in PeerRole if role.dns_name in given)


def role_of(kind: NodeKind) -> PeerRole:
    match kind:
        case NodeKind.PREFILL_WORKER:
            return PeerRole.PREFILL_WORKER
        case NodeKind.PD:
            return PeerRole.DECODE_WORKER
        case _:
            assert_never(kind)


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach what is bound to `host`. A name is taken for reachable."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def protection(plane: Plane, chosen: Protection | None) -> Protection:
    """Of KV, when nothing was chosen: as safe as the keys' way is."""
    if chosen is not None:
        return chosen
    return Protection.AES_GCM if plane is Plane.MTLS else Protection.CRC32C


def check_exposure(plane: Plane, chosen: Protection | None, hosts: Mapping[str, str], *, allow_plain: bool) -> None:
    """`hosts` are what is bound, by setting. Raises ConfigError naming the setting that exposes something."""
    if plane is Plane.MTLS:
        return
    exposed = [(setting, host) for setting, host in hosts.items() if not is_loopback(host)]
    if chosen is Protection.AES_GCM and exposed:
        raise ConfigError("security.kv", "aes-gcm needs security.mode = mtls: its keys would travel in plain")
    if exposed and not allow_plain:
        setting, host = exposed[0]
        raise ConfigError(
            setting, f"{host} can be reached from other machines: set security.mode = mtls or security.allow_plain"
        )


def check_files(plane: Plane, files: Mapping[str, str]) -> None:
    """`files` are the PEM files by setting. Raises ConfigError naming one that is missing, or that means nothing."""
    for setting, path in files.items():
        if plane is Plane.MTLS and not path:
            raise ConfigError(setting, "is required with security.mode = mtls")
        if plane is Plane.OFF and path:
            raise ConfigError(setting, "means nothing with security.mode = off")
