"""Dashboards of what crosses between regions, and of what is cached."""

from prfaas.observe import names
from tools.dashboards.expressions import now, per_s, quantile, ratio, times
from tools.dashboards.grafana import Dashboard, Line, Panel

_LINE = "{{peer_region}} to {{region}}"


def _link(title: str, unit: str, gauge: names.Gauge) -> Panel:
    return Panel(title, unit, (Line(now(gauge, "peer_region", "region", how="max"), _LINE),), gauge.help)


TRANSFER = Dashboard(
    "transfer",
    "Transfer and links",
    (
        _link("Use of the line", "percentunit", names.LINK_UTILIZATION),
        Panel(
            "Goodput and capacity",
            "Bps",
            (
                Line(now(names.LINK_GOODPUT, "peer_region", "region", how="max"), f"goodput {_LINE}"),
                Line(now(names.LINK_CAPACITY, "peer_region", "region", how="max"), f"capacity {_LINE}"),
            ),
        ),
        _link("Waiting to leave", "bytes", names.LINK_QUEUE),
        _link("Longest wait", "s", names.LINK_QUEUE_AGE),
        _link("Round trip", "s", names.LINK_RTT),
        _link("Sent again by TCP", "percentunit", names.LINK_RETRANSMITTED),
        Panel(
            "KV sent",
            "Bps",
            (Line(per_s(names.KV_SENT_BYTES, "instance", "peer_region"), "{{instance}} to {{peer_region}}"),),
        ),
        Panel(
            "KV received",
            "Bps",
            (Line(per_s(names.KV_RECEIVED_BYTES, "instance", "peer_region"), "{{instance}} from {{peer_region}}"),),
        ),
        Panel(
            "Let send by the leader",
            "Bps",
            (Line(now(names.KV_ALLOWED, "instance", "peer_region", how="min"), "{{instance}} to {{peer_region}}"),),
            names.KV_ALLOWED.help,
        ),
        Panel(
            "Failed transfers",
            "short",
            (Line(times(names.KV_FAILED_TRANSFERS, "cause"), "{{cause}}"),),
            names.KV_FAILED_TRANSFERS.help,
        ),
        Panel("Refused frames", "short", (Line(times(names.KV_REFUSED, "cause"), "{{cause}}"),), names.KV_REFUSED.help),
        Panel(
            "Prompt tokens that decode computed, per route",
            "short",
            (Line(ratio(per_s(names.RECOMPUTED_TOKENS, "path"), per_s(names.ROUTES, "path")), "{{path}}"),),
            names.RECOMPUTED_TOKENS.help,
        ),
        Panel(
            "KV per path",
            "Bps",
            (Line(per_s(names.KV_TRANSFER_BYTES, "path"), "{{path}}"),),
            names.KV_TRANSFER_BYTES.help,
        ),
        Panel(
            "Sent twice after a lost connection",
            "Bps",
            (Line(per_s(names.KV_RESENT_BYTES, "instance"), "{{instance}}"),),
            names.KV_RESENT_BYTES.help,
        ),
        Panel(
            "Connections",
            "short",
            (Line(now(names.KV_CONNECTIONS, "instance"), "{{instance}}"),),
            names.KV_CONNECTIONS.help,
        ),
    ),
)

CACHE = Dashboard(
    "cache",
    "Prefix cache",
    (
        Panel(
            "Cached, of prompt tokens",
            "percentunit",
            (
                Line(ratio(per_s(names.CACHED_TOKENS), per_s(names.PROMPT_TOKENS)), "taken from a cache"),
                Line(
                    ratio(per_s(names.CACHE_MATCHED_TOKENS, where={"kind": "joint"}), per_s(names.PROMPT_TOKENS)),
                    "known to the index",
                ),
            ),
        ),
        Panel(
            "How far off the index is",
            "short",
            (Line(quantile(0.95, names.CACHE_ERROR, "sign"), "p95 {{sign}}"),),
            names.CACHE_ERROR.help,
        ),
        Panel(
            "Shards by what the index has",
            "short",
            (Line(now(names.POOL_SHARDS, "region", "state", how="max"), "{{region}} {{state}}"),),
            names.POOL_SHARDS.help,
        ),
        Panel(
            "Silence of shards",
            "s",
            (Line(now(names.POOL_INDEX_AGE, "region", how="max"), "{{region}}"),),
            names.POOL_INDEX_AGE.help,
        ),
        Panel(
            "Memory of pools by state",
            "bytes",
            (
                Line(now(names.POOL_BYTES, "state"), "{{state}}"),
                Line(now(names.POOL_FREE_BYTES), "free"),
            ),
            names.POOL_BYTES.help,
            True,
        ),
        Panel(
            "Objects",
            "short",
            (
                Line(now(names.POOL_OBJECTS, "kind"), "{{kind}}"),
                Line(now(names.POOL_RESIDENT_OBJECTS, "kind"), "{{kind}} in memory"),
            ),
            names.POOL_OBJECTS.help,
        ),
        Panel(
            "Look-ups", "reqps", (Line(per_s(names.POOL_LOOKUPS, "outcome"), "{{outcome}}"),), names.POOL_LOOKUPS.help
        ),
        Panel("Gets", "reqps", (Line(per_s(names.POOL_GETS, "outcome"), "{{outcome}}"),), names.POOL_GETS.help),
        Panel("Puts", "reqps", (Line(per_s(names.POOL_PUTS, "outcome"), "{{outcome}}"),), names.POOL_PUTS.help),
        Panel(
            "Time of a get, by workers",
            "s",
            tuple(Line(quantile(q, names.WORKER_CACHE_GET_SECONDS), f"p{round(100 * q)}") for q in (0.5, 0.95)),
            names.WORKER_CACHE_GET_SECONDS.help,
        ),
        Panel("Evicted", "short", (Line(times(names.POOL_EVICTED, "why"), "{{why}}"),), names.POOL_EVICTED.help),
        Panel(
            "Leases",
            "short",
            (
                Line(now(names.POOL_LEASES, "instance"), "{{instance}}"),
                Line(times(names.POOL_LEASES_ENDED, where={"how": "expired"}), "expired"),
            ),
            names.POOL_LEASES.help,
        ),
        Panel(
            "Wasted tokens",
            "short",
            (Line(per_s(names.WORKER_CACHE_WASTED_TOKENS, "cause"), "{{cause}}"),),
            names.WORKER_CACHE_WASTED_TOKENS.help,
        ),
        Panel(
            "Tier below memory",
            "bytes",
            (Line(now(names.POOL_STORE_BYTES, "instance"), "{{instance}}"),),
            names.POOL_STORE_BYTES.help,
        ),
        Panel(
            "Brought from the other region",
            "Bps",
            (Line(per_s(names.WORKER_CACHE_PULLED_BYTES, "instance"), "{{instance}}"),),
            names.WORKER_CACHE_PULLED_BYTES.help,
        ),
    ),
)
