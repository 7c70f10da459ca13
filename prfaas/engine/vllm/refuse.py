"""How the connector says that it does not serve the server that has loaded it.

The server ends by the exception, which shows in its log; who has started it learns the reason over the bridge.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence

from prfaas.engine.vllm.bridge import News, Refused
from prfaas.engine.vllm.rule import Finding
from prfaas.ipc import Channel

CONNECT_S = 5.0


class Unsupported(Exception):
    """This server, or its cache, is of a kind that the connector does not serve. `setting`: the one of ours that it
    comes from."""

    def __init__(self, why: str, setting: str = "worker.vllm_arguments") -> None:
        super().__init__(why)
        self.setting = setting

    @classmethod
    def because(cls, refused: Sequence[Finding]) -> "Unsupported":
        return cls(". ".join(map(str, refused)), refused[0].rule.ours)


@contextlib.contextmanager
def refusals_told(bridge: str) -> Iterator[None]:
    """Each of the server's processes may refuse: whoever is first is heard."""
    try:
        yield
    except Unsupported as refusal:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_S)
            sock.connect(bridge)
            Channel[News](sock, News).send(Refused(refusal.setting, str(refusal)))
        raise
