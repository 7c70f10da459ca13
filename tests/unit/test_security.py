"""What is bound where, who is who, and how KV is protected: the rules of the security section."""

from typing import Any

import pytest

from prfaas import config
from prfaas.cluster import NodeKind
from prfaas.errors import ConfigError
from prfaas.security import PeerRole, Plane, Protection, is_loopback, protection, role_of, roles_in

FILES = {("security", "ca"): "ca.pem", ("security", "cert"): "w.pem", ("security", "key"): "w.key"}
MTLS = {("security", "mode"): "mtls", **FILES}
OUTSIDE = ("0.0.0.0", "::", "10.0.0.7", "192.168.1.1", "worker.example", "")
BOUND = [("worker", "rpc_host"), ("kv", "host")]


def load(overrides: dict[tuple[str, str], Any]) -> config.Config:
    return config.load(overrides=overrides, environ={})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback_may_be_in_plain(host: str):
    """Nobody outside the machine reaches it."""
    assert is_loopback(host)
    load(dict.fromkeys(BOUND, host))


@pytest.mark.parametrize("host", OUTSIDE)
@pytest.mark.parametrize("setting", BOUND, ids=".".join)
def test_what_others_can_reach_is_not_bound_in_plain(setting: tuple[str, str], host: str):
    """Refused by the name of what would be bound, unless it is said outright, or there are certificates."""
    with pytest.raises(ConfigError) as refused:
        load({setting: host})
    assert refused.value.path == ".".join(setting)
    load({setting: host, ("security", "allow_plain"): "true"})
    load({setting: host, **MTLS})


@pytest.mark.parametrize("setting", FILES, ids=".".join)
def test_certificates_need_all_three_files(setting: tuple[str, str]):
    """One that is missing is named before anything starts."""
    with pytest.raises(ConfigError, match="is required") as refused:
        load({each: value for each, value in MTLS.items() if each != setting})
    assert refused.value.path == ".".join(setting)


@pytest.mark.parametrize("setting", FILES, ids=".".join)
def test_a_certificate_without_mtls_is_a_mistake(setting: tuple[str, str]):
    """Who names files believes that they protect something."""
    with pytest.raises(ConfigError, match="means nothing") as refused:
        load({setting: "file.pem"})
    assert refused.value.path == ".".join(setting)


def test_keys_of_kv_do_not_travel_in_plain():
    """Encrypted KV whose keys crossed the network beside it would be protected from nobody, allowed or not."""
    plain = {("kv", "host"): "10.0.0.7", ("security", "allow_plain"): "true", ("security", "kv"): "aes-gcm"}
    with pytest.raises(ConfigError) as refused:
        load(plain)
    assert refused.value.path == "security.kv"
    load({("security", "kv"): "aes-gcm"})
    load({**plain, **MTLS})


def test_kv_is_as_safe_as_its_keys():
    """Encrypted with certificates and checked without, when nothing is chosen."""
    assert protection(Plane.MTLS, None) is Protection.AES_GCM
    assert protection(Plane.OFF, None) is Protection.CRC32C
    for plane in Plane:
        for chosen in Protection:
            assert protection(plane, chosen) is chosen


def test_the_environment_sets_it_too():
    """As every setting."""
    variables = {f"PRFAAS_{section}_{name}".upper(): value for (section, name), value in MTLS.items()}
    environ = {**variables, "PRFAAS_SECURITY_KV": "crc32c", "PRFAAS_SECURITY_ALLOW_PLAIN": "true"}
    own = config.load(environ=environ).security
    assert (own.mode, own.kv, own.allow_plain, own.key) == (Plane.MTLS, Protection.CRC32C, True, "w.key")


def test_a_name_of_ours_is_a_role_and_no_other_is():
    """A host that is called like a role has none, nor has a subdomain of one."""
    names = ["router.prfaas.internal", "router", "decode-worker.prfaas.internal.example", "x.store.prfaas.internal"]
    assert roles_in(names) == {PeerRole.ROUTER}
    assert [role_of(kind) for kind in NodeKind] == [PeerRole.PREFILL_WORKER, PeerRole.DECODE_WORKER]
