"""The planner's figures: whole-node and mixed roles, the baselines, and narrow links."""

from collections.abc import Iterator, Mapping
from typing import Any

from prfaas.sim.case_study import LINK_GBPS, planner_figures
from prfaas.sim.document import Block, Chart, Heading, Table, Text
from prfaas.sim.plots import Line, line_chart
from prfaas.sim.wanted import LINKS_REQUESTS_PER_S

COLUMNS = ("t", "n_p", "n_d", "theta_prfaas", "theta_pdp", "theta_pdd", "lambda_max", "egress_gbps")


def figures() -> dict[str, Any]:
    return dict(planner_figures())


def blocks(found: Mapping[str, Any]) -> Iterator[Block]:
    mixed = found["planner"]["mixed"]
    yield Heading("The planner")
    yield Text("Rates are requests per second and are averaged over the requests, not taken at the mean length.")
    yield Table(
        ["fleet", *COLUMNS],
        [[fleet, *(f"{row[column]:,.4g}" for column in COLUMNS)] for fleet, row in found["planner"].items()],
    )
    yield Text(
        f"With mixed roles one node gives {mixed['share']:.0%} of its time to prefill, in chunks of "
        f"{mixed['chunk_tokens']} tokens, and decodes a batch small enough for 40 tokens/s. Expected time between "
        f"tokens: p50 {1000 * mixed['itl_p50_s']:.1f} ms, p99 {1000 * mixed['itl_p99_s']:.1f} ms. Without that limit "
        f"Lambda_max would be {mixed['unlimited_lambda_max']:.2f}."
    )
    links = {int(gbps): row for gbps, row in found["links"].items()}
    yield Table(
        ["link, Gbps", "Lambda_max", "paper's model", "t"],
        [
            [str(gbps), f"{row['lambda_max']:.2f}", f"{LINKS_REQUESTS_PER_S[str(gbps)]:.2f}", f"{row['t']:,}"]
            for gbps, row in links.items()
        ],
    )
    wide = found["planner"]["prfaas_pd"]["lambda_max"]
    lines = [
        Line("planner", [(gbps, row["lambda_max"]) for gbps, row in sorted(links.items())] + [(LINK_GBPS, wide)]),
        Line("paper's model", [(float(g), rate) for g, rate in reversed(LINKS_REQUESTS_PER_S.items())], dashed=True),
    ]
    chart = line_chart("Lambda_max behind narrow links", "Gbps", "requests/s", lines, log_x=True)
    yield Chart("links", "What the fleet sustains when the link is narrow, threshold and roles re-optimized.", chart)
