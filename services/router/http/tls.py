"""HTTPS: the certificate of the OpenAI endpoint, as its files have it now.

A renewed certificate is used for new connections without a restart; connections that stand keep the one they began
with. Files that cannot be used (half replaced, the key of another certificate) leave the last good ones in force.
"""

import asyncio
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import structlog
from cryptography import x509

from prfaas.errors import ConfigError

#: How often the files are looked at.
LOOK_S = 5.0
CERT, KEY = "router.tls_cert", "router.tls_key"

#: What changes when the files do.
_Mark = tuple[tuple[int, int, int] | None, ...]
_Ssl = ssl.SSLObject | ssl.SSLSocket

log = structlog.get_logger()


class ServerTls:
    """Raises ConfigError when the files cannot be used from the start.

    `context` is what servers are given. It stays the same, and hands every new connection to the context of the
    newest files: loading another certificate into a context that is in use would leave the old one beside it, if its
    key is of another kind.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._mark = self._look()
        self._newest, self._expires_at = _read(cert, key)
        self.context = self._newest
        self.context.sni_callback = self._hand_over
        self.loaded, self.failed = 1, 0

    @property
    def valid_s(self) -> float:
        """How long the certificate in use is still valid; negative when it is not."""
        return (self._expires_at - datetime.now(UTC)).total_seconds()

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the files if they are not as they were read last."""
        mark = await asyncio.to_thread(self._look)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._newest, self._expires_at = await asyncio.to_thread(_read, self._cert, self._key)
        except ConfigError as error:
            self.failed += 1
            log.error("the certificate could not be read, the old one stays", error=str(error))
        else:
            self.loaded += 1
            log.info("the certificate is read", file=str(self._cert), expires=self._expires_at.isoformat())

    def _hand_over(self, connection: _Ssl, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _look(self) -> _Mark:
        return tuple(_mark(path) for path in (self._cert, self._key))


def _read(cert: Path, key: Path) -> tuple[ssl.SSLContext, datetime]:
    """Ready to serve with, and until when."""
    chain, _ = (_content(setting, path) for setting, path in ((CERT, cert), (KEY, key)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def refuse() -> str:
        raise ConfigError(KEY, f"{key} is encrypted, and nobody is there to type its password")

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except OSError as error:
        raise ConfigError(CERT, f"{cert} and {key} are no pair: {error}") from error
    expires_at = x509.load_pem_x509_certificate(chain).not_valid_after_utc
    if expires_at <= datetime.now(UTC):
        raise ConfigError(CERT, f"{cert} has expired on {expires_at:%Y-%m-%d}")
    return context, expires_at


def _content(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(setting, f"{path}: {error.strerror}") from error


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
