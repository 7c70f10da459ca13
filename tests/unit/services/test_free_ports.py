"""Ports for processes to come: nobody gets one that another has been given."""

import socket
import subprocess
import sys
from pathlib import Path

from services import free_ports as free_ports_module
from services.free_ports import free_ports

#: Another process, which is offered these and no others.
SCRIPT = """
import random, sys
from services.free_ports import free_ports
random.sample = lambda population, size: [int(port) for port in sys.argv[1:]]
try:
    print(free_ports(1))
except OSError as error:
    print(error)
"""


def test_they_differ_and_no_connection_takes_them():
    """The kernel gives outgoing connections other ones."""
    ports = free_ports(64)
    lowest, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert len(set(ports)) == 64 and max(ports) < int(lowest)


def test_another_process_does_not_get_what_is_claimed():
    """Though nobody listens there yet."""
    ports = free_ports(3)
    got = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, ports)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert got.stdout.strip() == "no free port"


def test_where_somebody_listens_is_no_free_port(monkeypatch):
    """Also if it is not one of ours."""
    [port, other] = free_ports(2)
    while free_ports_module._claims:
        free_ports_module._claims.popleft().close()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen()
        monkeypatch.setattr(free_ports_module.random, "sample", lambda population, size: [port, other])
        assert free_ports(1) == [other]
