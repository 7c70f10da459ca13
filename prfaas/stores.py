"""The store that the configuration names."""

from pathlib import Path

from prfaas.config import StoreConfig
from prfaas.errors import ConfigError
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.etcd_calls import Login, Tls


def open_store(section: StoreConfig) -> EtcdStore:
    """A client of the etcd members, or of an embedded store that speaks as they do. Raises ConfigError."""
    if not section.endpoints:
        raise ConfigError("store.endpoints", "names no member")
    if bool(section.cert) != bool(section.key):
        raise ConfigError("store.cert", "cert and key belong together")
    tls = _tls(section) if section.ca else None
    login = Login(section.username, section.password) if section.username else None
    return EtcdStore([_address(endpoint, bool(tls)) for endpoint in section.endpoints], tls=tls, login=login)


def _address(endpoint: str, secure: bool) -> str:
    """`host:port`, also of an endpoint written as a URL, as etcd's own tools take it."""
    scheme, separator, rest = endpoint.partition("://")
    address = rest if separator else endpoint
    host, _, port = address.rstrip("/").rpartition(":")
    if not host or not port.isdigit() or (separator and scheme != ("https" if secure else "http")):
        expected = "https://host:port (store.ca is set)" if secure else "http://host:port"
        raise ConfigError("store.endpoints", f"{endpoint!r} is neither host:port nor {expected}")
    return f"{host}:{port}"


def _tls(section: StoreConfig) -> Tls:
    pair = (Path(section.cert), Path(section.key)) if section.cert else (None, None)
    return Tls(Path(section.ca), *pair)
