"""Dashboards of workers, and of what keeps the cluster together."""

from prfaas.observe import names
from tools.dashboards.expressions import now, per_s, ratio, times
from tools.dashboards.grafana import Dashboard, Line, Panel

_EACH = "{{instance}}"


def _gauge(title: str, unit: str, gauge: names.Gauge) -> Panel:
    return Panel(title, unit, (Line(now(gauge, "instance"), _EACH),), gauge.help)


def _counter(title: str, unit: str, counter: names.Counter) -> Panel:
    return Panel(title, unit, (Line(per_s(counter, "instance"), _EACH),), counter.help)


WORKERS = Dashboard(
    "workers",
    "Workers",
    (
        _counter("Prefilled tokens", "short", names.ENGINE_PREFILL_TOKENS),
        _gauge("Prompt tokens waiting for prefill", "short", names.QUEUED_PREFILL_TOKENS),
        _counter("Tokens fed to decode", "short", names.DECODE_FORWARDED_TOKENS),
        _gauge("Sequences in the batch", "short", names.ACTIVE_SEQUENCES),
        _gauge("Tokens promised to sequences", "short", names.COMMITTED_TOKENS),
        _counter("Attempts refused for want of room", "reqps", names.ADMISSION_REFUSED),
        Panel(
            "Free KV memory",
            "percentunit",
            (Line(ratio(now(names.KV_FREE_BYTES, "instance"), now(names.KV_TOTAL_BYTES, "instance")), _EACH),),
        ),
        _gauge("Attempts that hold a place", "short", names.RESERVATIONS),
        _gauge("Prefilled, waiting for decode", "short", names.KEPT_SEQUENCES),
        _gauge("Spans in the KV pool", "short", names.KV_SPANS),
        Panel("Roles", "short", (Line(now(names.WORKER_ROLE, "role"), "{{role}}"),), names.WORKER_ROLE.help, True),
        Panel("Phases", "short", (Line(now(names.WORKER_PHASE, "phase"), "{{phase}}"),), names.WORKER_PHASE.help, True),
        _gauge("Token links to routers", "short", names.SESSIONS),
        Panel(
            "Peers turned away",
            "short",
            (Line(times(names.RPC_REFUSED, "instance", "reason"), "{{instance}} {{reason}}"),),
            names.RPC_REFUSED.help,
        ),
        _gauge("Certificate valid for", "s", names.CERTIFICATE_VALID),
    ),
)

CONTROL = Dashboard(
    "control",
    "Control plane",
    (
        _gauge("Who leads", "short", names.LEADS),
        _gauge("Age of the view", "s", names.VIEW_AGE),
        Panel(
            "Epoch of the plan",
            "short",
            (
                Line(now(names.ROUTER_PLAN_EPOCH, how="max"), "in force"),
                Line(now(names.PLAN_EPOCH, "instance"), "read by {{instance}}"),
            ),
        ),
        Panel("Mode", "short", (Line(now(names.MODE_NOW, "mode"), "{{mode}}"),), names.MODE_NOW.help, True),
        _gauge("Threshold t", "short", names.THRESHOLD),
        Panel("Role changes", "short", (Line(times(names.ROLE_CHANGES, "instance"), _EACH),), names.ROLE_CHANGES.help),
        Panel(
            "Refused plans", "short", (Line(times(names.REFUSED_PLANS, "instance"), _EACH),), names.REFUSED_PLANS.help
        ),
        Panel("Nodes", "short", (Line(now(names.LIVE_NODES, "kind", how="max"), "{{kind}}"),), names.LIVE_NODES.help),
        Panel(
            "Links to workers that failed",
            "short",
            (Line(times(names.LINK_FAILURES, "instance"), _EACH),),
            names.LINK_FAILURES.help,
        ),
        _gauge("Memory of the cache's index", "bytes", names.POOL_INDEX_BYTES),
        Panel(
            "Times that the index became stale",
            "short",
            (Line(times(names.POOL_STALE, "reason"), "{{reason}}"),),
            names.POOL_STALE.help,
        ),
        _gauge("API keys in force", "short", names.KEYS),
    ),
)
