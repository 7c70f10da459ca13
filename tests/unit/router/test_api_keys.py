"""API keys: the file, the commands that write it, and routers that follow it."""

import asyncio
import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from prfaas.errors import ConfigError
from services.cli import main
from services.router import api_keys
from services.router.admission_keys import LiveKeys
from services.router.api_keys import PREFIX, KeySet


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments])


def added(path: Path, tenant: str = "acme", *more: str) -> tuple[str, str]:
    made = run("add", "--file", str(path), "--tenant", tenant, "--json", *more)
    assert made.exit_code == 0, made.output
    facts = json.loads(made.output)
    assert facts["tenant"] == tenant
    return facts["id"], facts["key"]


def found(path: Path, key: str) -> str | None:
    match = KeySet(api_keys.read(path)).find(key)
    return match[0] if match else None


@pytest.fixture(params=["keys.json", "keys.toml"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_a_key_is_shown_once_and_kept_as_a_hash(path: Path):
    """Whoever reads the file cannot use what is in it, and only its owner reads it."""
    key_id, key = added(path, "acme", "--model", "tiny", "--model", "large", "--note", 'for "CI" 🙂')
    assert key.startswith(PREFIX) and len(key) > 50
    assert key not in path.read_text() and key not in run("list", "--file", str(path)).output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [listed] = [json.loads(line) for line in run("list", "--file", str(path), "--json").output.splitlines()]
    assert listed | {"created": ""} == {
        "id": key_id, "tenant": "acme", "models": ["tiny", "large"], "note": 'for "CI" 🙂', "created": "",
    }  # fmt: skip
    assert found(path, key) == key_id
    record = api_keys.read(path).keys[key_id]
    for wrong in (key[:-1], key + "x", key.upper(), record.hash, "", "x" * 100_000, "\udc80"):
        assert found(path, wrong) is None


def test_hashes_of_one_file_mean_nothing_for_another(path: Path, tmp_path: Path):
    """Each has a salt of its own."""
    _, key = added(path)
    other = tmp_path / f"other{path.suffix}"
    added(other)
    assert api_keys.read(other).salt != api_keys.read(path).salt
    assert found(other, key) is None


def test_a_revoked_key_is_gone_and_the_others_stay(path: Path):
    """With whatever a person has written into the file."""
    first, key = added(path)
    second, other = added(path, "beta")
    _, third = added(path)
    if path.suffix == ".toml":
        limited = path.read_text().replace('[tenants."acme"]', "# Ours.\n[tenants.acme]\nrequests_per_min = 5")
        path.write_text(limited)
    path.chmod(0o640)
    assert run("revoke", "--file", str(path), second).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert found(path, other) is None
    assert found(path, key) == first and found(path, third) is not None
    if path.suffix == ".toml":
        assert "# Ours." in path.read_text()
        assert api_keys.read(path).tenants["acme"].requests_per_min == 5
    assert run("revoke", "--file", str(path), second).exit_code == 2


def test_a_file_that_cannot_be_changed_stays_as_it_is(tmp_path: Path):
    """A key in a table that is no section of its own, a broken file, a tenant's name that is none."""
    path = tmp_path / "keys.toml"
    inline = f'salt = "{"0" * 32}"\ntenants = {{t = {{}}}}\n[keys]\nk = {{tenant = "t", hash = "{"1" * 64}"}}\n'
    for text in (inline, "salt = ["):
        path.write_text(text)
        assert run("revoke", "--file", str(path), "k").exit_code == 1
        assert path.read_text() == text
    path.write_text(inline)
    assert run("add", "--file", str(path), "--tenant", "a b").exit_code == 1
    assert path.read_text() == inline
    assert [each.name for each in tmp_path.iterdir()] == ["keys.toml"]


HASH = "1" * 64


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "salt"),
        ('salt = "00"', "salt"),
        ("[tenants.t]\nrequests_per_min = 0", "tenants"),
        ("[tenants.t]\ntokens_per_min = inf", "tenants"),
        ("[tenants.t]\ntokens_per_min = nan", "tenants"),
        ("[tenants.t]\nweight = 0.0", "tenants"),
        ("[tenants.t]\nmax_concurrent = 0", "tenants"),
        ("[tenants.t]\nrequest_per_min = 5", "request_per_min"),
        ('[tenants.t]\npriority = "best"', "best"),
        ('[tenants."a b"]', "tenants"),
        pytest.param("number = " + "9" * 5000, "integer", id="a number too long to read"),
        pytest.param("list = " + "[" * 5000, "recursion", id="too deep to read"),
        (f'[keys.k]\ntenant = "t"\nhash = "{HASH}"', "not among the tenants"),
        ('[tenants.t]\n[keys.k]\ntenant = "t"\nhash = "abc"', "hash"),
        (f'[tenants.t]\n[keys.k]\ntenant = "t"\nhash = "{HASH}"\n[keys.l]\ntenant = "t"\nhash = "{HASH}"', "twice"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, what: str):
    """None of them is taken for no limit."""
    path = tmp_path / "keys.toml"
    path.write_text(text if what == "salt" else f'salt = "{"0" * 32}"\n{text}')
    with pytest.raises(ConfigError, match=what):
        LiveKeys(path)


def test_a_running_router_follows_the_file(path: Path):
    """A broken file changes nothing and is told of once; the next good one counts again."""
    key_id, key = added(path)
    live = LiveKeys(path)
    assert live.current.find(key) is not None
    _, second = added(path)
    asyncio.run(live.look())
    assert live.current.find(second) is not None
    good = path.read_text()
    with capture_logs() as logs:
        path.write_text(good[: len(good) // 2] + "{")
        asyncio.run(live.look())
        asyncio.run(live.look())
        path.unlink()
        asyncio.run(live.look())
    assert [line["log_level"] for line in logs] == ["error", "error"]
    assert live.current.find(key) is not None and live.current.find(second) is not None
    path.write_text(good)
    asyncio.run(live.look())
    run("revoke", "--file", str(path), key_id)
    asyncio.run(live.look())
    assert live.current.find(key) is None and live.current.find(second) is not None
    assert (live.loaded, live.failed) == (4, 2)


def test_a_router_does_not_start_without_the_keys_it_should_ask_for(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        LiveKeys(tmp_path / "keys.json")


async def test_it_looks_by_itself(path: Path):
    """Until it is cancelled."""
    key_id, key = await asyncio.to_thread(added, path)
    live = LiveKeys(path)
    following = asyncio.create_task(live.run())
    await asyncio.to_thread(run, "revoke", "--file", str(path), key_id)
    async with asyncio.timeout(20):
        while live.current.find(key) is not None:  # noqa: ASYNC110 - what it has read is the condition
            await asyncio.sleep(0.01)
    following.cancel()
