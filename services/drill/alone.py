"""One drill at a time on a cluster: two would be judged by each other's fault."""

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.errors import ConfigError


@contextmanager
def alone_on(endpoint: str) -> Iterator[None]:
    """Among the drills of this machine. Raises ConfigError where another one is under way.

    The claim is a name of the kernel's, which goes with the process however that ends.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0prfaas-drill-{hashlib.sha256(endpoint.encode()).hexdigest()[:32]}")
        except OSError:
            raise ConfigError("drill", f"another drill is under way on {endpoint}") from None
        yield
