"""A drill from its first reference to its report."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.errors import DeadlineExceeded, PeerUnavailable
from services.drill.bounds import BOUNDS, Drill, Seen, report
from services.drill.faults import Fault
from services.drill.load import Load
from services.http_client import fetch

POLL_S = 0.2
#: What a worker or a router holds for requests, by the names of its metrics.
HELD = (
    "prfaas_router_in_flight_requests",
    "prfaas_worker_reservations",
    "prfaas_worker_kv_spans",
    "prfaas_worker_engine_active_sequences",
    "prfaas_worker_kept_sequences",
)
LIVE = "prfaas_router_live_nodes"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """`before_s` and `after_s`: of load without a fault; `fault_s`: how long it lasts where it does not undo itself;
    `release_s`: until everything must be given back, and whoever was killed be there again."""

    before_s: float = 5.0
    fault_s: float = 10.0
    after_s: float = 5.0
    release_s: float = 90.0


def run(drill: Drill, fault: Fault, load: Load, times: Times, metrics: Mapping[str, str], say: Say) -> dict[str, Any]:
    """The report. Raises PeerUnavailable when the cluster does not answer before the fault, or cannot be hit."""
    say("asking for reference answers")
    if errors := load.learn():
        raise PeerUnavailable(load.ask.endpoint, f"not a cluster that is well: {errors[0]}")
    live = _live(metrics)
    load.start()
    try:
        say(f"load for {times.before_s:g} s")
        if not _came_true(lambda: len(load.so_far()) >= 2 * load.clients, times.release_s):
            raise DeadlineExceeded("the first answers", times.release_s)
        time.sleep(times.before_s)
        hit, fault_s, struck_s = _inflict(fault, load, times, say)
        time.sleep(times.after_s)
        _came_true(lambda: _answered_since(load, fault_s), BOUNDS[drill].right_again_s)
    finally:
        load.stop()
    say("checking answers")
    left = None if not metrics else _left(metrics, live, times.release_s)
    checked = load.check()
    return report(Seen(drill, hit, fault_s, struck_s, load.so_far(), left, checked))


def _inflict(fault: Fault, load: Load, times: Times, say: Say) -> tuple[str, float, float]:
    """What was hit, and the times between which it was: a command may take its time."""
    fault_s = time.monotonic()
    try:
        hit = fault.inflict(load.so_far(), times.fault_s)
        struck_s = time.monotonic()
        say(f"hit: {hit}")
        time.sleep(times.fault_s)
    finally:
        fault.heal()
    say("it is over")
    return hit, fault_s, struck_s


def _answered_since(load: Load, fault_s: float) -> bool:
    return any(one.begun_s > fault_s and not one.error for one in load.so_far())


def _came_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Within that time. What has not after the fault is the report's to tell."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _left(metrics: Mapping[str, str], live: float, seconds: float) -> list[str]:
    """What is still held, or missing, when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        left = [f"{name} of {process}: {value:g}" for process in metrics for name, value in _held(metrics[process])]
        if (now := _live(metrics)) < live:
            left.append(f"{live - now:g} workers are not back")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def _held(url: str) -> list[tuple[str, float]]:
    return [(name, value) for name, value in _samples(url) if name in HELD and value]


def _live(metrics: Mapping[str, str]) -> float:
    """Workers as the routers see them: those of the one that sees fewest."""
    seen = [[value for name, value in _samples(url) if name == LIVE] for url in metrics.values()]
    return min((sum(counts) for counts in seen if counts), default=0.0)


def _samples(url: str) -> list[tuple[str, float]]:
    """By name, without labels. Nothing from whoever does not answer."""
    try:
        _, body = fetch(url)
    except (OSError, ValueError):
        return []
    lines = (line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#"))
    return [(series.partition("{")[0], float(value)) for series, value in lines]
