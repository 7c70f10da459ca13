"""What a vLLM server counts of itself, and how much of that are requests of others than us."""

from prfaas.engine.messages import ServerLoad


class Others:
    """`server` is what it counted last; None when it did not say."""

    def __init__(self) -> None:
        self.server: ServerLoad | None = None
        self.running = self.waiting = 0

    def counted(self, server: ServerLoad | None, ours: int) -> None:
        """`ours`: as many requests as it may know of us. What it has beyond these are the others', those that run
        first."""
        self.server = server
        if server is None:
            self.running = self.waiting = 0
            return
        others = max(0, server.running + server.waiting - ours)
        self.running = min(others, server.running)
        self.waiting = others - self.running
