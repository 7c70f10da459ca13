"""The compose cluster, really up: what it answers, and what it outlives.

Images come from SERVICE_IMAGE, ENGINE_IMAGE, ETCD_IMAGE and PROMETHEUS_IMAGE, as the compose file takes them. The
tests share one cluster and run in the order in which they stand. DEPLOY_LOGS names a file for what all containers said.
"""

import json
import os
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.free_ports import free_ports
from services.http_client import fetch
from tests.deploy.asking import Asking, Got, complete
from tests.deploy.composed import ONCE, PROJECT, Composed, run
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.timeout(900)

MODEL = "tiny"
THRESHOLD_TOKENS = 512
SHORT, LONG, VERY_LONG = 60, 1500, 6000
OUTPUT = 24
CUT_S = 15.0

Figures = dict[str, Any]


@pytest.fixture(scope="module")
def composed(figures: Figures) -> Iterator[Composed]:
    ports = free_ports(3)
    names = ("ROUTER_1_PORT", "ROUTER_2_PORT", "PROMETHEUS_PORT")
    environ = {**os.environ, "COMPOSE_NAME": PROJECT, "THRESHOLD_TOKENS": str(THRESHOLD_TOKENS)}
    environ |= {name: str(port) for name, port in zip(names, ports, strict=True)}
    routers = {f"router-{number}": f"http://127.0.0.1:{port}" for number, port in enumerate(ports[:2], start=1)}
    cluster = Composed(environ, routers)
    cluster.down()
    try:
        figures["seconds_to_healthy"] = round(cluster.up(), 1)
        for router in cluster.routers.values():
            _eventually_sees(router, prefill=2, decode=2)
        yield cluster
    finally:
        if logs := os.environ.get("DEPLOY_LOGS"):
            Path(logs).write_text(cluster.compose("logs", "--no-color", "--timestamps"))
        cluster.down()


@pytest.fixture(scope="module")
def alone(composed: Composed, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The same engine on the very model of the cluster, outside of it."""
    folder = tmp_path_factory.mktemp("model")
    run("docker", "cp", f"{composed.container('decode-b-1')}:/models/{MODEL}", str(folder))
    return Alone(folder / MODEL)


def _samples(endpoint: str) -> dict[str, float]:
    _, body = fetch(f"{endpoint}/metrics")
    lines = (line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def _eventually_sees(router: str, *, prefill: int, decode: int, limit_s: float = 90.0) -> None:
    begun = time.monotonic()
    while (live := _live_nodes(router)) < prefill + decode:
        assert time.monotonic() - begun < limit_s, f"{router} sees {live} nodes"
        time.sleep(0.5)


def _live_nodes(router: str) -> float:
    """As the router counts them; 0 while it does not answer."""
    try:
        samples = _samples(router)
    except OSError:
        return 0
    return sum(value for name, value in samples.items() if name.startswith("prfaas_router_live_nodes{"))


def _relayed_bytes(composed: Composed) -> float:
    page = composed.python(
        "wan-relay",
        "from urllib.request import urlopen as u; print(u('http://127.0.0.1:9100/metrics').read().decode())",
    )
    lines = [line for line in page.splitlines() if line.startswith("prfaas_relay_bytes_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _summary(asking: Asking) -> Figures:
    took = sorted(got.ended - got.sent for _, got in asking.done)
    paths = [got.receipt["path"] for _, got in asking.done]
    return {
        "answered": len(asking.done),
        "failed": len(asking.failed),
        "remote": paths.count("remote"),
        "local": paths.count("local"),
        "longest_s": round(took[-1], 2),
    }


def _is_remote(got: Got) -> bool:
    return bool(got.receipt["path"] == "remote")


def test_the_images_are_small_and_run_as_nobody(figures: Figures):
    """What runs has no pip, and the routers' image no torch."""
    images = {name: os.environ[name] for name in ("SERVICE_IMAGE", "ENGINE_IMAGE")}
    for name, image in images.items():
        facts = json.loads(run("docker", "image", "inspect", image))[0]
        assert facts["Config"]["User"] == "10001:10001"
        figures[f"{name.lower()}_mb"] = round(facts["Size"] / 1e6)
        probe = "import importlib.util as u; print(*(bool(u.find_spec(name)) for name in ('pip', 'torch', 'services')))"
        found = run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", probe).split()
        assert found == ["False", str(name == "ENGINE_IMAGE"), "True"], image
    assert figures["service_image_mb"] < 500 < figures["engine_image_mb"] < 2000


def test_everything_is_healthy(composed: Composed):
    services = composed.config()["services"]
    assert {composed.health(name) for name in services.keys() - ONCE} == {"healthy"}
    for name in ONCE:
        assert composed.inspect(name)["State"]["ExitCode"] == 0


def test_the_regions_meet_at_the_relay_only(composed: Composed):
    """From region b, a worker of region a cannot be reached by its address, and can by its name, which is the
    relay's."""
    address = composed.address("prefill-a-1", "region-a")
    program = f"""
import socket
def reached(host):
    try:
        socket.create_connection((host, 7110), 3).close()
    except OSError:
        return False
    return True
hosts = "{address}", "prefill-a-1.region-a", "prefill-a-1"
print(*map(reached, hosts), socket.gethostbyname("prefill-a-1"))
"""
    direct, by_region, by_name, found = composed.python("decode-b-1", program).split()
    assert (direct, by_region, by_name) == ("False", "False", "True")
    assert found == composed.address("wan-relay", "region-b")


CERTIFICATE = ("/certs/cert.pem", "/certs/key.pem")


def _greeting(address: str, *pairs: tuple[str, ...]) -> str:
    """A program that says for each pair of certificate and key whether the server stays with a client that has it."""
    host, port = address.split(":")
    return f"""
import socket, ssl
for pair in {pairs}:
    context = ssl.create_default_context(cafile="/certs/ca.pem")
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if pair:
        context.load_cert_chain(*pair)
    with socket.create_connection(("{host}", {port}), 10) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                secured.settimeout(4)
                print("stays" if secured.recv(1) else "leaves")
        except TimeoutError:
            print("stays")
        except OSError:
            print("leaves")
"""


@pytest.mark.parametrize(
    "address", ["etcd-1:2379", "decode-b-1:7210", "decode-b-1:7211", "pool-b:7230", "prefill-a-1:7110"]
)
def test_nobody_is_served_without_a_certificate(composed: Composed, address: str):
    """A client of the same network that trusts the authority, without and with a certificate of its own: the server
    leaves the one as soon as it has said who it is, and stays with the other."""
    assert composed.python("router-1", _greeting(address, (), CERTIFICATE)).split() == ["leaves", "stays"]


@pytest.mark.parametrize(("volume", "answer"), [("certs-router", "leaves"), ("certs-store", "stays")])
def test_members_of_the_store_know_each_other_by_their_role(composed: Composed, volume: str, answer: str):
    """Whatever address one comes from: to look for it behind every name of a certificate takes a member longer than its
    peer waits. Each connection broke soon, and where the machine had much to do there was no leader."""
    network, mount = f"{PROJECT}_region-b", f"{PROJECT}_{volume}:/certs:ro"
    client = ("docker", "run", "--rm", "--network", network, "--volume", mount, "--entrypoint", "python")
    said = run(*client, os.environ["SERVICE_IMAGE"], "-c", _greeting("etcd-1:2380", CERTIFICATE))
    assert said.split() == [answer]


def test_a_short_prompt_stays_in_its_region(composed: Composed, alone: Alone):
    ids = token_ids(SHORT, seed=1)
    got = complete([*composed.routers.values()], MODEL, ids, OUTPUT)
    assert got.token_ids == alone.answer(ids, OUTPUT)
    assert (got.receipt["path"], got.receipt["kv_bytes"]) == ("local", 0)


@pytest.mark.parametrize("length", [LONG, VERY_LONG])
def test_a_long_prompt_crosses_with_the_tokens_of_the_local_answer(
    composed: Composed, alone: Alone, figures: Figures, length: int
):
    """It is prefilled in region a, its KV crosses the relay, and one token is computed again."""
    ids, before = token_ids(length, seed=length), _relayed_bytes(composed)
    got = complete([*composed.routers.values()], MODEL, ids, OUTPUT)
    receipt, crossed = got.receipt, _relayed_bytes(composed) - before
    assert got.token_ids == alone.answer(ids, OUTPUT)
    assert receipt["path"] == "remote"
    assert receipt["prefill"].startswith("prefill-a-") and receipt["decode"].startswith("decode-b-")
    assert receipt["recomputed_tokens"] == 1
    assert 0 < receipt["kv_bytes"] < crossed
    figures[f"crossing_{length}_tokens"] = {
        "kv_bytes": receipt["kv_bytes"],
        "relayed_bytes": crossed,
        "ttft_s": round(receipt["ttft_seconds"], 3),
    }


def test_the_demo_shows_its_receipts(composed: Composed):
    said = composed.compose("exec", "-T", "router-1", "prfaas", "demo", "--endpoint", "http://127.0.0.1:8000")
    assert "demo: ok" in said
    assert "KV that crossed" in said


def test_prometheus_sees_everybody(composed: Composed):
    """And it evaluates the alert rules."""
    query = urllib.parse.quote("up == 1")
    begun = time.monotonic()
    while True:
        _, body = fetch(f"http://127.0.0.1:{composed.environ['PROMETHEUS_PORT']}/api/v1/query?query={query}")
        up = {one["metric"]["instance"] for one in json.loads(body)["data"]["result"]}
        if len(up) == 8:
            break
        assert time.monotonic() - begun < 60, up
        time.sleep(1)
    _, body = fetch(f"http://127.0.0.1:{composed.environ['PROMETHEUS_PORT']}/api/v1/rules?type=alert")
    rules = [rule for group in json.loads(body)["data"]["groups"] for rule in group["rules"]]
    assert rules
    assert not [rule for rule in rules if rule["health"] == "err"]


def _asking(composed: Composed, alone: Alone, first_seed: int) -> Asking:
    return Asking([*composed.routers.values()], MODEL, alone, (SHORT, LONG, 300, LONG, 900), first_seed, OUTPUT)


def test_a_region_is_cut_off_and_comes_back_without_a_failed_request(
    composed: Composed, alone: Alone, figures: Figures
):
    """The relay is taken out of region a's network. Long prompts are prefilled where they are decoded until it is
    back, and then go to region a again."""
    with _asking(composed, alone, 10_000).running() as asking:
        asking.until(_is_remote, 60, "a long prompt goes to region a")
        composed.leave("wan-relay", "region-a")
        try:
            asking.until(
                lambda got: (
                    len(got.token_ids) == OUTPUT
                    and got.receipt["path"] == "local"
                    and got.receipt["prompt_tokens"] >= LONG
                ),
                90,
                "a long prompt stays",
            )
            time.sleep(CUT_S)  # how long it lasts is the test's choice, nothing is waited for
        finally:
            composed.join("wan-relay", "region-a")
        healed = time.monotonic()
        asking.until(_is_remote, 180, "a long prompt goes to region a again")
        back_s = time.monotonic() - healed
    figures["cut"] = _summary(asking) | {"seconds_until_remote_again": round(back_s, 1)}
    asking.check()


def test_a_prefill_container_is_killed_without_a_failed_request(composed: Composed, alone: Alone, figures: Figures):
    """It dies as for want of memory, is started again by its restart policy, and takes part again."""
    for router in composed.routers.values():
        _eventually_sees(router, prefill=2, decode=2)
    restarts = composed.inspect("prefill-a-1")["RestartCount"]
    with _asking(composed, alone, 20_000).running(clients=3) as asking:
        asking.until(lambda got: got.receipt["prefill"] == "prefill-a-1", 90, "it prefills")
        composed.compose("exec", "-T", "prefill-a-1", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
        asking.until(lambda got: got.receipt["prefill"] == "prefill-a-2", 60, "the other one prefills")
        begun = time.monotonic()
        while composed.inspect("prefill-a-1")["RestartCount"] == restarts:
            assert time.monotonic() - begun < 60, "it is not started again"
            time.sleep(0.2)
        composed.wait_healthy("prefill-a-1")
        asking.until(lambda got: got.receipt["prefill"] == "prefill-a-1", 120, "it prefills again")
        back_s = time.monotonic() - begun
    figures["prefill_killed"] = _summary(asking) | {"seconds_until_it_prefills_again": round(back_s, 1)}
    asking.check()


def test_routers_are_restarted_one_by_one_without_an_error(composed: Composed, alone: Alone, figures: Figures):
    with _asking(composed, alone, 30_000).running(clients=3) as asking:
        asking.until(_is_remote, 60, "requests are answered")
        for router, endpoint in composed.routers.items():
            started = composed.inspect(router)["State"]["StartedAt"]
            composed.compose("restart", "--timeout", "40", router)
            composed.wait_healthy(router)
            _eventually_sees(endpoint, prefill=2, decode=2)
            assert composed.inspect(router)["State"]["StartedAt"] != started
            asking.until(_is_remote, 60, "requests are answered after it")
    figures["routers_restarted"] = _summary(asking)
    asking.check()
