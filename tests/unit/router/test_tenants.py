"""Opposite `services/router/tenants.py`."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prfaas.config import CacheConfig
from prfaas.errors import ConfigError
from services.router.tenants import Tenants


def salts(cache: CacheConfig, cluster: str = "c") -> tuple[bytes, bytes]:
    tenants = Tenants.of(cache, cluster)
    return tenants.salt("one"), tenants.salt("other")


def test_each_tenant_has_a_salt_of_its_own_and_all_routers_the_same():
    """It follows from the secret and the tenant alone."""
    one, other = salts(CacheConfig(secret="s"))
    assert one != other
    assert (one, other) == salts(CacheConfig(secret="s"), cluster="elsewhere")
    assert one not in salts(CacheConfig(secret="another"))


def test_the_secret_may_be_in_a_file(tmp_path: Path):
    """Which wins; the line's end is no part of it."""
    file = tmp_path / "secret"
    file.write_text("s\n")
    assert salts(CacheConfig(secret_file=str(file), secret="x")) == salts(CacheConfig(secret="s"))
    file.write_text("\n")
    for bad in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"cache\.secret_file"):
            Tenants.of(CacheConfig(secret_file=str(bad)), "c")


def test_without_a_secret_the_clusters_name_keeps_tenants_apart_and_that_is_logged_once():
    with capture_logs() as logs:
        one, other = salts(CacheConfig())
    assert [line["log_level"] for line in logs] == ["warning"]
    assert one != other
    assert one not in salts(CacheConfig(), cluster="d")
    with capture_logs() as logs:
        salts(CacheConfig(enabled=False))
    assert not logs
