"""What one screen of `prfaas status` says of things that are not as they should be."""

from typing import Any

from rich.console import Console

from services.status.reading import Reading, Told
from services.status.screen import screen


def state(**changed: Any) -> dict[str, Any]:
    """As a router tells it, of a cluster without workers."""
    ttft = {"p50_seconds": None, "p90_seconds": None, "count": 0}
    counts = dict.fromkeys(("total", "retried", "failed", "prompt_tokens", "cached_tokens", "output_tokens"), 0)
    return {
        "router": {"id": "r0", "cluster": "c", "model": "m", "leads": True, "leader": "r0", "view_age_seconds": 0.1},
        "plan": {"epoch": 1, "last_round": None, "lost": False},
        "routers": {"total": 1},
        "threshold": {
            "effective_threshold_tokens": 512,
            "mode": "auto",
            "decision": None,
            "pinned": False,
            "abundant": False,
        },
        "links": {"shown": []},
        "requests": {**counts, "by_path": {}, "ttft": ttft},
        "breakers": {"total": 0, "shown": []},
        "regions": [],
        "nodes": {"shown": [], "total": 0, "gone": 0},
        "cache": None,
        "admission": {"waiting": 0},
    } | changed


def shown(told: dict[str, Any], shunned: dict[str, str] | None) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(screen(Reading(0.0, (Told("http://r0", told),), shunned), None, 120, None))
    return captured.get()


def test_canaries_are_good_only_where_the_router_said_so():
    """An answer that did not come is not one without shunned workers."""
    assert "canary none shunned" in shown(state(), {})
    assert "canary 1 workers shunned" in shown(state(), {"p0": "wrong token"})
    unknown = shown(state(), None)
    assert "canary not known" in unknown and "! canaries" in unknown


def test_what_needs_a_look_is_in_the_first_lines():
    """Of a small terminal all others may be cut off."""
    gone = Told("http://r1", None, "no answer")
    console = Console(width=44)
    with console.capture() as captured:
        console.print(screen(Reading(0.0, (Told("http://r0", state()), gone), {}), None, 44, 10))
    assert "! router http://r1: no answer" in captured.get().splitlines()[:4]


def test_a_shard_whose_index_is_not_current_is_named_with_why():
    shards = [
        {"id": "pool-a", "region": "a", "state": "stale", "age_seconds": 42.0, "updates": 3, "behind": "a gap"},
        {"id": "pool-b", "region": "b", "state": "current", "age_seconds": 0.2, "updates": 9, "behind": None},
    ]
    cache = {"states": {"stale": 1, "current": 1}, "index_bytes": 10, "shards": {"total": 2, "shown": shards}}
    text = shown(state(cache=cache), {})
    assert "pool-a (a) is stale: heard of 42 s ago, began anew: a gap" in text
    assert "pool-b" not in text
