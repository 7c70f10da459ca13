"""A real etcd for tests: one member, or three, on free loopback ports, ended by their process ids."""

import json
import shutil
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from services.free_ports import free_ports

ETCD = shutil.which("etcd")
ETCDCTL = shutil.which("etcdctl")
START_S = 20.0


@dataclass(frozen=True)
class Member:
    """What a member is told of itself and the others. A single one elects itself at once: there short times only make
    it start and count leases down sooner. Several need the time that a busy machine may keep one waiting."""

    name: str
    directory: Path
    client_port: int
    peer_port: int
    initial_cluster: str
    heartbeat_ms: int = 50
    election_ms: int = 250


@dataclass
class EtcdProcess:
    member: Member
    process: subprocess.Popen[bytes]

    @property
    def directory(self) -> Path:
        return self.member.directory

    @property
    def client_port(self) -> int:
        return self.member.client_port

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As a crash: nothing is flushed, nobody is told."""
        self._end(signal.SIGKILL)

    def start_again(self) -> None:
        """On the same ports and data."""
        self.process = _spawn(self.member)
        _wait_until_healthy(self)

    def pause(self) -> None:
        """It keeps its connections and says nothing more: so a partition looks from outside."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def lose_data(self) -> None:
        """Of a stopped server."""
        shutil.rmtree(self.directory / "data")

    def ctl(self, *arguments: str) -> str:
        return etcdctl(self.endpoint, *arguments)

    def _end(self, how: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


def start_etcd(directory: Path) -> EtcdProcess:
    directory.mkdir(parents=True, exist_ok=True)
    client_port, peer_port = free_ports(2)
    member = Member("test", directory, client_port, peer_port, f"test=http://127.0.0.1:{peer_port}")
    etcd = EtcdProcess(member, _spawn(member))
    try:
        _wait_until_healthy(etcd)
    except BaseException:
        etcd.kill()
        raise
    return etcd


@dataclass
class EtcdCluster:
    """Three members of one store."""

    members: list[EtcdProcess]

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def leader(self) -> EtcdProcess:
        """Of those that run. Fails when there is none in time."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for member in self.members:
                if member.process.poll() is None and _leads(member):
                    return member
            time.sleep(0.05)
        raise AssertionError("the members elected no leader")

    def others(self, one: EtcdProcess) -> list[EtcdProcess]:
        return [member for member in self.members if member is not one]

    def stop(self) -> None:
        for member in self.members:
            member.resume()
            member.kill()


def start_etcd_cluster(directory: Path, size: int = 3) -> EtcdCluster:
    ports = free_ports(2 * size)
    peers = dict(zip((f"m{number}" for number in range(size)), ports[size:], strict=True))
    whole = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
    cluster = EtcdCluster([])
    try:
        for (name, peer_port), client_port in zip(peers.items(), ports[:size], strict=True):
            (directory / name).mkdir(parents=True)
            member = Member(name, directory / name, client_port, peer_port, whole, heartbeat_ms=100, election_ms=1000)
            cluster.members.append(EtcdProcess(member, _spawn(member)))
        for started in cluster.members:
            _wait_until_healthy(started)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _leads(etcd: EtcdProcess) -> bool:
    try:
        status = json.loads(_asked(etcd, "/v3/maintenance/status", b"{}"))
    except OSError:
        return False
    return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]


def etcdctl(endpoint: str, *arguments: str, stdin: str = "") -> str:
    assert ETCDCTL is not None
    command = [ETCDCTL, f"--endpoints={endpoint}", *arguments]
    done = subprocess.run(
        command, input=stdin, env={"ETCDCTL_API": "3"}, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _spawn(member: Member) -> subprocess.Popen[bytes]:
    assert ETCD is not None
    client, peer = f"http://127.0.0.1:{member.client_port}", f"http://127.0.0.1:{member.peer_port}"
    flags = {
        "name": member.name,
        "data-dir": str(member.directory / "data"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": member.initial_cluster,
        "heartbeat-interval": str(member.heartbeat_ms),
        "election-timeout": str(member.election_ms),
        "log-level": "error",
    }
    with (member.directory / "etcd.log").open("ab") as log:
        return subprocess.Popen(
            [ETCD, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )


def _wait_until_healthy(etcd: EtcdProcess) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert etcd.process.poll() is None, (etcd.directory / "etcd.log").read_text()
        try:
            if b'"true"' in _asked(etcd, "/health"):
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError("etcd did not become healthy: " + (etcd.directory / "etcd.log").read_text())


def _asked(etcd: EtcdProcess, path: str, body: bytes | None = None) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"http://{etcd.endpoint}{path}", body), timeout=2) as answer:
        content: bytes = answer.read()
        return content
