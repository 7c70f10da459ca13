"""What the routers tell of the cluster: the same state that the live page shows, asked of each admin API.

Routers see one cluster, so nodes, links, plan and threshold are taken from one of them: the leader where it is among
those asked, else the first that answers. Requests are each router's own, and are added up.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from services.http_client import ask, error_message

#: More nodes than a screen has lines are summed up anyway.
ASKED_FOR = {"nodes": 200, "decisions": 1}
NO_ADMIN_API = "it answers, and not as an admin API does"


@dataclass(frozen=True, slots=True)
class Told:
    """By one router: its state, or why there is none."""

    url: str
    state: Mapping[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """All that was told at one moment. `at_s` is of the reader's clock."""

    at_s: float
    told: tuple[Told, ...]
    #: Workers whose canaries came back wrong, with what was wrong; None where no router could be asked.
    shunned: Mapping[str, str] | None

    @property
    def states(self) -> list[Mapping[str, Any]]:
        return [each.state for each in self.told if each.state is not None]

    @property
    def main(self) -> Mapping[str, Any] | None:
        states = self.states
        return next((state for state in states if state["router"]["leads"]), states[0] if states else None)

    def described(self, before: "Reading | None") -> dict[str, Any]:
        """As JSON: what routers tell, and what follows from all of them."""
        return {
            "routers": [{"url": each.url, "problem": each.problem or None, "state": each.state} for each in self.told],
            "shunned": None if self.shunned is None else dict(self.shunned),
            "requests": self.requests(),
            "rates": rates(before, self) if before is not None else None,
            "hints": hints(self, before),
        }

    def requests(self) -> dict[str, Any]:
        """Totals of all routers that answer. Quantiles of several routers cannot be added: the worst is told."""
        tallies = [state["requests"] for state in self.states]
        paths: Counter[str] = Counter()
        for tally in tallies:
            paths.update(tally["by_path"])
        totals = ("total", "retried", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
        return {
            **{name: sum(tally[name] for tally in tallies) for name in totals},
            "by_path": dict(paths),
            "ttft_p50_seconds": _worst(tally["ttft"]["p50_seconds"] for tally in tallies),
            "ttft_p90_seconds": _worst(tally["ttft"]["p90_seconds"] for tally in tallies),
            "ttft_count": sum(tally["ttft"]["count"] for tally in tallies),
        }


def _worst(seconds: Any) -> float | None:
    return max((each for each in seconds if each is not None), default=None)


def read(urls: Sequence[str], key: str, now_s: float, timeout_s: float) -> Reading:
    """Ask all routers at once."""
    with ThreadPoolExecutor(max_workers=min(16, len(urls))) as pool:
        told = tuple(pool.map(lambda url: _ask(url, key, timeout_s), urls))
    asked = next((each.url for each in told if each.state is not None), None)
    return Reading(now_s, told, _shunned(asked, key, timeout_s) if asked is not None else None)


def _ask(url: str, key: str, timeout_s: float) -> Told:
    answer = _call("POST", url, "live", key, timeout_s, ASKED_FOR, "router")
    return Told(url, None, answer) if isinstance(answer, str) else Told(url, answer)


def _shunned(url: str, key: str, timeout_s: float) -> dict[str, str] | None:
    answer = _call("GET", url, "workers", key, timeout_s, None, "workers")
    if isinstance(answer, str):
        return None
    return {each["id"]: each["shunned"] for each in answer["workers"] if each.get("shunned")}


def _call(method: str, url: str, what: str, key: str, timeout_s: float, body: Any, holds: str) -> Any:
    """What is told, or as text why nothing is. `holds` is a name that is in what an admin API tells."""
    try:
        status, text = ask(method, f"{url.rstrip('/')}/admin/v1/{what}", key=key, body=body, timeout_s=timeout_s)
        answer = json.loads(text)
    except OSError as error:
        return f"no answer: {error}"
    except (ValueError, RecursionError):
        return NO_ADMIN_API
    if status != HTTPStatus.OK:
        return error_message(answer, status)
    return answer if isinstance(answer, dict) and holds in answer else NO_ADMIN_API


def rates(before: Reading, after: Reading) -> dict[str, float]:
    """Requests and tokens per second between two readings, of the routers that told both times. A router that started
    anew counts from 0."""
    seconds = after.at_s - before.at_s
    first = {each.url: each.state for each in before.told if each.state is not None}
    found: Counter[str] = Counter({"local": 0, "remote": 0, "none": 0, "output_tokens": 0, "failed": 0})
    for each in after.told:
        if each.state is None or each.url not in first:
            continue
        old, new = first[each.url], each.state
        same = old["router"]["uptime_seconds"] <= new["router"]["uptime_seconds"]
        earlier = _counts(old["requests"]) if same else {}
        for name, value in _counts(new["requests"]).items():
            found[name] += value - earlier.get(name, 0)
    return {f"{name}_per_s": value / seconds if seconds > 0 else 0.0 for name, value in found.items()}


def _counts(requests: Mapping[str, Any]) -> dict[str, int]:
    return {
        **requests["by_path"],
        "output_tokens": requests["output_tokens"],
        "failed": requests["failed"],
    }


#: A link is nearly full from here on, and a view of the cluster is old.
FULL_RATIO, OLD_VIEW_S = 0.85, 10.0


def hints(reading: Reading, before: Reading | None) -> list[str]:
    """What an operator should look at, the worst first."""
    found = [f"router {each.url}: {each.problem}" for each in reading.told if each.state is None]
    state = reading.main
    if state is None:
        return found
    if state["router"]["leader"] is None:
        found.append("no router leads: plans are not made, the last one stays in force")
    for each in reading.states:
        age_s = each["router"]["view_age_seconds"]
        if age_s is None or age_s > OLD_VIEW_S:
            found.append(f"{each['router']['id']} has not heard from the store for {_age(age_s)}")
    bad = [node for node in state["nodes"]["shown"] if node["state"] in ("silent", "gone")]
    found += [f"worker {node['id']} ({node['region']}) is {node['state']}" for node in bad]
    if reading.shunned is None:
        found.append("canaries: the router did not say whom they found wrong")
    found += [
        f"canary: worker {node} gives wrong answers: {why}" for node, why in sorted((reading.shunned or {}).items())
    ]
    for each in state["breakers"]["shown"]:
        found.append(f"breaker {each['circuit']}: {each['around']} {each['source']} to {each['target'] or 'any'}")
    for link in state["links"]["shown"]:
        if (used := link["utilization"]) is not None and used >= FULL_RATIO:
            found.append(f"link {link['source']} to {link['target']} is {used:.0%} full: t rises")
    cache = state["cache"]
    if cache is not None and (stale := cache["states"].get("stale", 0)):
        found.append(f"{stale} cache shards are followed with a stale index: prefixes there are not used")
    if before is not None:
        recent = rates(before, reading)
        if recent["failed_per_s"] > 0:
            found.append(f"{recent['failed_per_s']:.2f} requests/s fail or are refused")
    if state["plan"]["lost"]:
        found.append("the plan in force is lost: t is the last known one")
    admission = state["admission"]
    if admission["waiting"]:
        found.append(f"{admission['waiting']} requests wait for admission")
    return found


def _age(seconds: float | None) -> str:
    return "any time" if seconds is None else f"{seconds:.0f} s"
