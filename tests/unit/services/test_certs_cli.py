"""`prfaas certs`: a test authority and its certificates, made, shown, and not replaced by accident."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.security import PeerRole
from services.certificates import existing
from services.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["certs", *arguments])


def shown(path: Path) -> dict[str, object]:
    return json.loads(run("show", "--json", str(path)).output)


@pytest.mark.parametrize("role", PeerRole, ids=lambda role: role.value)
def test_each_role_has_a_certificate_for_the_hosts_given(tmp_path: Path, role: PeerRole):
    """Names and addresses, beside those of this machine and the role's own."""
    made = run("init", str(tmp_path), "--host", "kv.example", "--host", "10.1.2.3", "--host", "fd00::1", "--days", "7")
    assert made.exit_code == 0, made.output
    facts = shown(tmp_path / f"{role.value}.pem")
    names = [role.dns_name, "localhost", "127.0.0.1", "::1", "kv.example", "10.1.2.3", "fd00::1"]
    assert (facts["names"], facts["roles"], facts["expired"]) == (names, [role.value], False)
    left = datetime.fromisoformat(str(facts["expires"])) - datetime.now(UTC)
    assert timedelta(days=6) < left <= timedelta(days=7)
    assert facts["issuer"] == shown(tmp_path / "ca.pem")["subject"]


@pytest.mark.parametrize(
    "host",
    ["router.prfaas.internal", "Store.PRFAAS.internal.", "*.prfaas.internal", "prfaas.internal", "", " ", "a b", "a\t"],
)
def test_a_host_gives_no_role(tmp_path: Path, host: str):
    """All certificates would be a router's. What is no host's name is refused too, before anything is made."""
    refused = run("init", str(tmp_path / "certs"), "--host", "kv.example", "--host", host)
    assert refused.exit_code == 1 and repr(host) in refused.output and "Traceback" not in refused.output
    assert not (tmp_path / "certs").exists()


def test_a_host_may_look_like_a_role(tmp_path: Path):
    made = run("init", str(tmp_path), "--host", "router.notprfaas.internal", "--host", "router.prfaas.internal.example")
    assert made.exit_code == 0, made.output
    assert shown(tmp_path / "store.pem")["roles"] == ["store"]


def test_nothing_is_replaced_without_force(tmp_path: Path):
    """The authority of a running cluster, least of all: exit code 2, and every file as it was."""
    assert run("init", str(tmp_path)).exit_code == 0
    before = {path: path.read_bytes() for path in existing(tmp_path)}
    for name in ("ca.pem", "router.pem"):
        (tmp_path / name).unlink()
    refused = run("init", str(tmp_path))
    assert refused.exit_code == 2 and "--force" in refused.output
    assert {path: path.read_bytes() for path in existing(tmp_path)} == {
        path: content for path, content in before.items() if path.name not in ("ca.pem", "router.pem")
    }
    assert run("init", str(tmp_path), "--force").exit_code == 0
    after = {path: path.read_bytes() for path in existing(tmp_path)}
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())


def test_what_is_no_certificate_is_named(tmp_path: Path):
    """A key, or nothing at all: one line and exit code 1."""
    run("init", str(tmp_path))
    for name in ("router.key", "none.pem"):
        failed = run("show", str(tmp_path / name))
        assert failed.exit_code == 1 and name in failed.output and "Traceback" not in failed.output


def test_a_person_reads_it_line_by_line(tmp_path: Path):
    """Subject, names, roles and expiry, each on a line of its own."""
    run("init", str(tmp_path))
    lines = run("show", str(tmp_path / "router.pem")).output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["subject", "issuer", "names", "roles", "expires", "expired"]
