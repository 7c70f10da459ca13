"""The ports of `flows.canary`: those of requests, but for what is counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from prfaas.live.serve_ports import LiveServePorts
from prfaas.request import Request, Route
from prfaas.scheduling.canary import Canary, Probe, Verdict

log = structlog.get_logger()


class LiveCanaryPorts(LiveServePorts):
    """Its work counts as load of the nodes, and not as demand. `verdicts` counts since the start."""

    def __init__(self, canary: Canary, live_routers: Callable[[], int], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._canary, self._live_routers = canary, live_routers
        self._told: frozenset[str] = frozenset()
        self.verdicts: Counter[Verdict] = Counter()

    def routed(self, request: Request, route: Route) -> None:
        """Nobody wanted it."""

    def hedging(self) -> None:
        """No other node may answer for the one that is tried."""

    def live_routers(self) -> int:
        return self._live_routers()

    def judged(self, probe: Probe, verdict: Verdict, detail: str) -> None:
        self.verdicts[verdict] += 1
        facts = {"prefill": probe.prefill, "decode": probe.decode, "verdict": verdict.value, "detail": detail}
        match verdict:
            case Verdict.WRONG:
                log.error("canary", **facts)
            case Verdict.FAILED:
                log.warning("canary", **facts)
            case Verdict.RIGHT | Verdict.SKIPPED:
                log.debug("canary", **facts)
        distrusted = self._canary.distrusted
        if new := distrusted - self._told:
            reasons = self._canary.reasons()
            log.error("workers are distrusted", nodes={node: reasons[node] for node in sorted(new)})
        if trusted := self._told - distrusted:
            log.info("workers are trusted again", nodes=sorted(trusted))
        self._told = distrusted
