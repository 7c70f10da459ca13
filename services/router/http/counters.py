"""What the HTTP front counts about itself, beside what the handlers count."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FrontCounters:
    """`refused` are answers, by status, of the front itself: to what is no request, breaks a limit or came too late.
    `body_bytes` are held for requests that are being received, wait, or have no answer yet."""

    open_connections: int = 0
    accepted: int = 0
    body_bytes: int = 0
    refused: Counter[int] = field(default_factory=Counter)
