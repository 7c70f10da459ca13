"""A certificate authority for tests and trials, and a certificate for each role of ours.

Keys are written with mode 0600 and every file appears whole under its name, so that running services may re-read them
at any time.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.security import DOMAIN, PeerRole, roles_in

CA = "ca"
#: Under which a process on the same machine is reached.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
#: Clocks of other machines may be behind by this much.
SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Shown:
    """What `prfaas certs show` tells about one certificate."""

    subject: str
    issuer: str
    names: tuple[str, ...]
    roles: tuple[str, ...]
    not_after: datetime

    @property
    def expired(self) -> bool:
        return self.not_after <= datetime.now(UTC)


def paths(directory: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key of a role, or of the authority."""
    return directory / f"{name}.pem", directory / f"{name}.key"


def pem_files(directory: Path, role: PeerRole) -> tuple[Path, Path, Path]:
    """Authority, certificate and key for a process of this role."""
    return paths(directory, CA)[0], *paths(directory, role.value)


def write_all(directory: Path, hosts: Sequence[str] = (), days: float = 365.0) -> list[Path]:
    """A new authority and a certificate of each role for these hosts beside the local ones. Replaces what is there."""
    authority = new_authority(days)
    issued = {role.value: issue(authority, (role,), hosts, days) for role in PeerRole}
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [path for name, each in {CA: authority, **issued}.items() for path in write(directory, name, each)]


def existing(directory: Path) -> list[Path]:
    """Files that `write_all` would replace."""
    names = (CA, *(role.value for role in PeerRole))
    return [path for name in names for path in paths(directory, name) if path.exists()]


def new_authority(days: float = 365.0) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("prfaas test CA")
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(name, name, key, timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Issued, roles: Sequence[PeerRole], hosts: Iterable[str] = (), days: float = 365.0) -> Issued:
    """A certificate for server and client alike. It is valid until `days` from now, which may be in the past. Raises
    ValueError for a host that is none, or that is a role's name."""
    key = ec.generate_private_key(ec.SECP256R1())
    role_names = [x509.DNSName(role.dns_name) for role in roles]
    names = [*role_names, *map(_host, dict.fromkeys((*LOCAL_HOSTS, *hosts)))]
    subject = _name(roles[0].dns_name if roles else "prfaas, no role")
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.certificate
    builder = (
        _builder(subject, issuer.subject, key, timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def write(directory: Path, name: str, issued: Issued) -> tuple[Path, Path]:
    certificate_path, key_path = paths(directory, name)
    pem = issued.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _replace(key_path, pem, 0o600)
    _replace(certificate_path, issued.certificate.public_bytes(Encoding.PEM), 0o644)
    return certificate_path, key_path


def show(path: Path) -> list[Shown]:
    """The certificates in a PEM file. Raises OSError and ValueError."""
    return [_shown(certificate) for certificate in x509.load_pem_x509_certificates(path.read_bytes())]


def _shown(certificate: x509.Certificate) -> Shown:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    texts = tuple(str(name.value) for name in names)
    roles = roles_in(names.get_values_for_type(x509.DNSName))
    return Shown(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        names=texts,
        roles=tuple(role.value for role in PeerRole if role in roles),
        not_after=certificate.not_valid_after_utc,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + life
    begin = min(datetime.now(UTC), end) - SKEW
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    if not host or any(letter.isspace() for letter in host):
        raise ValueError(f"{host!r} is not the name of a host")
    if f".{host}".lower().rstrip(".").endswith(f".{DOMAIN}"):
        raise ValueError(f"{host!r} would give a role: no host is under {DOMAIN}")
    return x509.DNSName(host)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _replace(path: Path, content: bytes, mode: int) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    scratch.replace(path)
