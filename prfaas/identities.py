"""The identity that the configuration names."""

from pathlib import Path

from prfaas.config import SecurityConfig
from prfaas.rpc.identity import Identity
from prfaas.security import PeerRole, Plane


def open_identity(section: SecurityConfig, role: PeerRole) -> Identity | None:
    """None where services talk in plain. Raises ConfigError when the files cannot be used."""
    if section.mode is Plane.OFF:
        return None
    return Identity(role, ca=Path(section.ca), cert=Path(section.cert), key=Path(section.key))
