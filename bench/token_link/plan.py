"""What is measured, and who the two sides are."""

from dataclasses import dataclass
from pathlib import Path

from prfaas.cluster import Incarnation, NodeId
from prfaas.rpc.identity import Identity
from prfaas.security import PeerRole
from services.certificates import pem_files

WORKER, LIFE = NodeId("worker"), Incarnation(1)
#: The one that is the default first: it is what the others are compared with.
ADAPTERS = ("tcp", "grpc")
SECURITY = ("off", "mtls")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`streams` requests at once, each of `tokens` tokens. `gap_ms` between two tokens of a stream, 0: all at once;
    `together`: all streams step in the same moment, as those of one engine's batch do, or spread over the gap, as those
    of many. `requests`: how many in all. `wanted`: how many times the default adapter's CPU, on the router's side, the
    other one takes at least, in plain and with certificates."""

    name: str
    streams: int
    tokens: int
    gap_ms: int = 0
    together: bool = False
    requests: int = 0
    wanted: tuple[float, float] = (1.0, 1.0)

    @property
    def total(self) -> int:
        return self.requests or self.streams


SCENARIOS = (
    Scenario("short requests, 32 at once", streams=32, tokens=8, requests=2000),
    Scenario("64 streams, spread", streams=64, tokens=60, gap_ms=50, wanted=(2.0, 1.5)),
    Scenario("512 streams, spread", streams=512, tokens=60, gap_ms=50, wanted=(2.0, 1.5)),
    Scenario("512 streams, in step", streams=512, tokens=60, gap_ms=50, together=True),
)


def identity(folder: Path, role: PeerRole) -> Identity:
    ca, cert, key = pem_files(folder, role)
    return Identity(role, ca=ca, cert=cert, key=key)
