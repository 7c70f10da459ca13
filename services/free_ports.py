"""Ports of the loopback address for processes that are about to be started.

Each is somebody's alone from the moment it is chosen, although nobody listens on it yet: it lies below the range from
which the kernel takes the ports of outgoing connections, and other processes that choose in this way see that it is
claimed, by a name that goes with the process that holds it.
"""

import random
import socket
from collections import deque
from pathlib import Path

_LOWEST = 10_240
#: The latest are held. By then older ones have somebody who listens, or who has ended.
_claims: deque[socket.socket] = deque()
_HELD = 256


def free_ports(count: int) -> list[int]:
    """All different. Raises OSError when there are none."""
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1
    candidates = iter(random.sample(range(_LOWEST, highest), highest - _LOWEST))
    ports: list[int] = []
    while len(ports) < count:
        port = next(candidates, None)
        if port is None:
            raise OSError("no free port")
        if _claimed(port):
            ports.append(port)
    return ports


def _claimed(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0prfaas-port-{port}")
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    if len(_claims) > _HELD:
        _claims.popleft().close()
    return True
