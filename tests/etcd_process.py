"""A real etcd for tests: one member on free loopback ports, ended by its process id."""

import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ETCD = shutil.which("etcd")
ETCDCTL = shutil.which("etcdctl")
START_S = 20.0


@dataclass
class EtcdProcess:
    directory: Path
    client_port: int
    peer_port: int
    process: subprocess.Popen[bytes]

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
        self.process = _spawn(self.directory, self.client_port, self.peer_port)
        _wait_until_healthy(self)

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
    client_port, peer_port = _free_port(), _free_port()
    etcd = EtcdProcess(directory, client_port, peer_port, _spawn(directory, client_port, peer_port))
    try:
        _wait_until_healthy(etcd)
    except BaseException:
        etcd.kill()
        raise
    return etcd


def etcdctl(endpoint: str, *arguments: str, stdin: str = "") -> str:
    assert ETCDCTL is not None
    command = [ETCDCTL, f"--endpoints={endpoint}", *arguments]
    done = subprocess.run(
        command, input=stdin, env={"ETCDCTL_API": "3"}, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _spawn(directory: Path, client_port: int, peer_port: int) -> subprocess.Popen[bytes]:
    assert ETCD is not None
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    flags = {
        "name": "test",
        "data-dir": str(directory / "data"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"test={peer}",
        # A single member elects itself; short times only make it start and count leases down sooner.
        "heartbeat-interval": "50",
        "election-timeout": "250",
        "log-level": "error",
    }
    with (directory / "etcd.log").open("ab") as log:
        return subprocess.Popen(
            [ETCD, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )


def _wait_until_healthy(etcd: EtcdProcess) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert etcd.process.poll() is None, (etcd.directory / "etcd.log").read_text()
        try:
            with opener.open(f"http://{etcd.endpoint}/health", timeout=2) as answer:
                if b'"true"' in answer.read():
                    return
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError("etcd did not become healthy: " + (etcd.directory / "etcd.log").read_text())


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
