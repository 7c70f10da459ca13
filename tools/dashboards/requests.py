"""Dashboards of what users see, and of the routers that serve them."""

from prfaas.observe import names
from tools.dashboards.expressions import mean, now, per_s, quantile, ratio, times
from tools.dashboards.grafana import Dashboard, Line, Panel

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    (
        Panel("Requests", "reqps", (Line(per_s(names.REQUESTS, "outcome"), "{{outcome}}"),), names.REQUESTS.help, True),
        Panel(
            "Failed of all that could succeed",
            "percentunit",
            (
                Line(
                    ratio(
                        per_s(names.REQUESTS, where={"outcome": "failed"}),
                        per_s(names.REQUESTS, where={"outcome": ("ok", "failed")}),
                    ),
                    "failed",
                ),
            ),
        ),
        Panel(
            "In flight and waiting",
            "short",
            (
                Line(now(names.IN_FLIGHT), "in flight"),
                Line(now(names.ADMISSION_QUEUED), "waiting for their turn"),
            ),
        ),
        Panel(
            "Time to the first token",
            "s",
            tuple(Line(quantile(q, names.TTFT, "path"), f"p{round(100 * q)} {{{{path}}}}") for q in (0.5, 0.95)),
            names.TTFT.help,
        ),
        Panel(
            "Between tokens",
            "s",
            tuple(Line(quantile(q, names.ITL), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)),
            names.ITL.help,
        ),
        Panel(
            "Where the time to the first token goes, remote",
            "s",
            (Line(mean(names.TTFT_TERM, "term", where={"path": "remote"}), "{{term}}"),),
            names.TTFT_TERM.help,
            True,
        ),
        Panel("Routes", "reqps", (Line(per_s(names.ROUTES, "path"), "{{path}}"),), names.ROUTES.help, True),
        Panel(
            "Threshold t",
            "short",
            (Line(now(names.THRESHOLD, "instance"), "{{instance}}"),),
            names.THRESHOLD.help,
        ),
        Panel(
            "Lines between regions",
            "percentunit",
            (Line(now(names.LINK_UTILIZATION, "peer_region", "region", how="max"), "{{peer_region}} to {{region}}"),),
            names.LINK_UTILIZATION.help,
        ),
        Panel(
            "Tokens",
            "short",
            (Line(per_s(names.PROMPT_TOKENS), "of prompts"), Line(per_s(names.OUTPUT_TOKENS), "of answers")),
        ),
        Panel(
            "Prompt tokens that were cached",
            "percentunit",
            (Line(ratio(per_s(names.CACHED_TOKENS), per_s(names.PROMPT_TOKENS)), "cached"),),
            names.CACHED_TOKENS.help,
        ),
        Panel("Nodes", "short", (Line(now(names.LIVE_NODES, "kind", how="max"), "{{kind}}"),), names.LIVE_NODES.help),
    ),
)

ROUTERS = Dashboard(
    "routers",
    "Routers",
    (
        Panel("Requests by router", "reqps", (Line(per_s(names.REQUESTS, "instance"), "{{instance}}"),)),
        Panel("Ready", "short", (Line(now(names.READY, "instance"), "{{instance}}"),), names.READY.help),
        Panel("Reasons of routes", "reqps", (Line(per_s(names.ROUTES, "reason"), "{{reason}}"),), stacked=True),
        Panel("Attempts", "reqps", (Line(per_s(names.ATTEMPTS, "ending"), "{{ending}}"),), names.ATTEMPTS.help, True),
        Panel(
            "Not let in",
            "reqps",
            (Line(per_s(names.REFUSED_REQUESTS, "reason"), "{{reason}}"),),
            names.REFUSED_REQUESTS.help,
            True,
        ),
        Panel(
            "Waiting for their turn",
            "s",
            tuple(Line(quantile(q, names.ADMISSION_WAIT), f"p{round(100 * q)}") for q in (0.5, 0.95)),
            names.ADMISSION_WAIT.help,
        ),
        Panel(
            "Breakers that are not closed",
            "short",
            (Line(now(names.BREAKERS, "around", "circuit", how="max"), "{{around}} {{circuit}}"),),
            names.BREAKERS.help,
        ),
        Panel(
            "Breakers that opened",
            "short",
            (Line(times(names.BREAKERS_OPENED, "around", "cause"), "{{around}} {{cause}}"),),
            names.BREAKERS_OPENED.help,
        ),
        Panel("Hedged prefills", "short", (Line(times(names.HEDGES, "what"), "{{what}}"),), names.HEDGES.help),
        Panel(
            "Streams that lost their node",
            "short",
            (Line(times(names.MIGRATIONS, "outcome"), "{{outcome}}"),),
            names.MIGRATIONS.help,
        ),
        Panel("Canaries", "short", (Line(times(names.CANARIES, "verdict"), "{{verdict}}"),), names.CANARIES.help),
        Panel(
            "Workers kept from", "short", (Line(now(names.SHUNNED, "why", how="max"), "{{why}}"),), names.SHUNNED.help
        ),
        Panel(
            "Longest without progress",
            "s",
            (Line(now(names.OLDEST_PROGRESS, "instance", how="max"), "{{instance}}"),),
            names.OLDEST_PROGRESS.help,
        ),
        Panel("Connections of clients", "short", (Line(now(names.HTTP_CONNECTIONS, "instance"), "{{instance}}"),)),
        Panel(
            "Not accounted for",
            "s",
            (Line(quantile(0.99, names.TTFT_UNACCOUNTED, "path"), "p99 {{path}}"),),
            names.TTFT_UNACCOUNTED.help,
        ),
    ),
)
