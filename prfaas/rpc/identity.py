"""The certificate of this process, and gRPC with it on either side.

The files are looked at for every connection, so that a new certificate is in use without a restart; connections that
stand keep the one they began with. Files that cannot be used (half replaced, of another role) leave the last good ones
in force, and are complained about once.
"""

import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from prfaas.errors import ConfigError
from prfaas.security import PeerRole, roles_in

log = structlog.get_logger()

#: Modification time, size and inode of each file.
_Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Material:
    """What the files hold, checked: the key belongs to the certificate, and the certificate to the
    role and the authority. As bytes for gRPC, and for TLS of our own: `server` asks every client for a certificate of
    our authority, `client` every server, and for the name that it is wanted by."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    server: ssl.SSLContext = field(repr=False)
    client: ssl.SSLContext = field(repr=False)
    expires_at: datetime


class Identity:
    """Who this process is to others. May be used from any thread. Raises ConfigError when the files cannot be used."""

    def __init__(self, role: PeerRole, *, ca: Path, cert: Path, key: Path) -> None:
        self.role = role
        self._ca, self._cert, self._key = ca, cert, key
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._material = self._read()
        if self._material.expires_at <= datetime.now(UTC):
            raise ConfigError("security.cert", f"{cert} has expired on {self._material.expires_at:%Y-%m-%d}")

    def material(self) -> Material:
        """What is in the files now, or the last of it that could be used."""
        with self._lock:
            try:
                if (seen := self._signature()) != self._seen:
                    # First the signature: a change while reading is seen at the next look.
                    self._seen = seen
                    self._material = self._read()
                    log.info("new certificate", role=self.role.value, expires=self._material.expires_at.isoformat())
            except ConfigError as error:
                log.warning("the certificate was not replaced", error=str(error))
            return self._material

    @property
    def valid_s(self) -> float:
        """How long the certificate in use is still valid; negative when it is not."""
        return (self._material.expires_at - datetime.now(UTC)).total_seconds()

    def server_credentials(self, begun: Callable[[], None]) -> grpc.ServerCredentials:
        """For a server that asks every client for a certificate of our authority. `begun` is called for each
        connection before it has shown one, in a thread of gRPC's."""
        given = [self.material()]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            begun()
            material = self.material()
            if material is given[0]:
                return None
            given[0] = material
            return _configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given[0]),
            renewed,  # type: ignore[arg-type]  # None, for no change, is missing in the stub
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        material = self.material()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    def _signature(self) -> _Signature:
        stats = [self._on(file, setting, Path.stat) for setting, file in self._files()]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _read(self) -> Material:
        ca, cert, key = (self._on(file, setting, Path.read_bytes) for setting, file in self._files())
        try:
            ssl.create_default_context(cadata=ca.decode("ascii"))
            authorities = x509.load_pem_x509_certificates(ca)
        except (OSError, ValueError) as error:
            raise ConfigError("security.ca", f"{self._ca} holds no certificate: {error}") from error
        try:
            server, client = (self._context(side, ca) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
            chain = x509.load_pem_x509_certificates(cert)
            leaf = chain[0]
        except (OSError, ValueError) as error:
            raise ConfigError("security.cert", f"{self._cert} and {self._key} are no pair: {error}") from error
        if self.role not in roles_in(_dns_names(leaf)):
            raise ConfigError("security.cert", f"{self._cert} has no name {self.role.dns_name}")
        if not _leads_to(chain, authorities):
            raise ConfigError("security.ca", f"{self._ca} did not sign {self._cert}")
        return Material(ca, cert, key, server, client, leaf.not_valid_after_utc)

    def _context(self, side: int, ca: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ca.decode("ascii"))
        context.load_cert_chain(self._cert, self._key, password="")
        return context

    def _files(self) -> tuple[tuple[str, Path], ...]:
        return ("security.ca", self._ca), ("security.cert", self._cert), ("security.key", self._key)

    def _on(self, file: Path, setting: str, act: Callable[[Path], Any]) -> Any:
        try:
            return act(file)
        except OSError as error:
            raise ConfigError(setting, f"{file}: {error.strerror}") from error


def dial(
    identity: Identity | None, peer: PeerRole, address: str, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """A channel that, with an identity, speaks only to a process of the role `peer`, whatever its address."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options)
    name = ("grpc.ssl_target_name_override", peer.dns_name)
    return grpc.aio.secure_channel(address, identity.channel_credentials(), (*options, name))


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)


def _leads_to(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether one of the authorities signed the certificate, or one of those that came with it."""
    return any(_signed(authority, certificate) for authority in authorities for certificate in chain)


def _signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)
