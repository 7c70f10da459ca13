"""What can be said of the Dockerfile and the compose file without starting anything."""

import asyncio
import os

import pytest

from prfaas.observe.http import TEXT, serve_text
from tests.deploy.composed import ONCE, Composed, run


@pytest.fixture(scope="module")
def services() -> dict:
    return Composed(dict(os.environ)).config()["services"]


def test_hadolint_finds_nothing():
    run("hadolint", "deploy/docker/Dockerfile")


def test_everything_is_confined(services: dict):
    """Read-only, without capabilities or a way to get any, not as root, within limits."""
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].partition(":")[0] not in ("", "0", "root"), name
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory", "pids"} <= limits.keys(), name


def test_everything_that_stays_is_watched_and_restarted(services: dict):
    for name in services.keys() - ONCE:
        assert services[name]["restart"] == "unless-stopped", name
        assert services[name]["healthcheck"]["test"], name


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
async def test_a_page_is_asked_for_its_status(services: dict, status: int, code: int):
    """By the command that stands in the file, on another port; where nobody listens it fails as well."""
    _, *probe = services["prefill-a-1"]["healthcheck"]["test"]
    page = await serve_text("127.0.0.1", 0, {"/ready": lambda: (status, TEXT, b"as it is\n")})
    port = page.sockets[0].getsockname()[1]
    command = [part.replace("/9100", f"/{port}").replace("$$", "$") for part in probe]
    async with page:
        assert await _exit_code(command) == code
    assert await _exit_code(command) != 0


async def _exit_code(command: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(*command)
    return await asyncio.wait_for(process.wait(), 30)


def test_what_starts_waits_for_what_it_needs(services: dict):
    """Nothing is waited for that is merely started."""
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if other in ONCE else "service_healthy"
            assert condition["condition"] == expected, (name, other)
    assert services["router-1"]["depends_on"].keys() >= {"etcd-1", "etcd-2", "etcd-3", "decode-b-1", "decode-b-2"}


def test_only_the_relay_carries_between_the_regions(services: dict):
    both = {name for name, one in services.items() if {"region-a", "region-b"} <= (one.get("networks") or {}).keys()}
    assert both == {"wan-relay", "prometheus"}


def test_each_service_sees_its_own_certificate_only(services: dict):
    """The volume of each role is mounted by services of that role, read-only, and by the one that fills it."""
    for name in services.keys() - ONCE:
        mounts = [one for one in services[name].get("volumes", ()) if one["source"].startswith("certs-")]
        expected = set() if name in ("wan-relay", "prometheus") else {f"certs-{_role(name)}"}
        assert {one["source"] for one in mounts} == expected, name
        assert all(one["read_only"] for one in mounts), name


def _role(service: str) -> str:
    kinds = {"router": "router", "prefill": "prefill-worker", "decode": "decode-worker", "pool": "cache-pool"}
    return kinds.get(service.partition("-")[0], "store")
