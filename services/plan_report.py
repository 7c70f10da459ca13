"""What `prfaas plan` shows on a terminal: a table of a sized fleet, and notes on what its figures do not say."""

from prfaas.profile import GBPS
from prfaas.scheduling.throughput import Binding
from services.sizing import Sized

STAGES = {
    Binding.PRFAAS: "prefill of long prompts",
    Binding.LINK: "the link",
    Binding.PD_PREFILL: "prefill on PD nodes",
    Binding.PD_DECODE: "decode",
}


def rows(sized: Sized) -> list[list[str]]:
    """Names and values, what belongs to the row above indented."""
    told, mixed = sized.described(), sized.plan.mixed
    link = told["link_gbps"]
    made = [
        ["PrfaaS instances (prefill, other region)", str(told["prfaas_nodes"])],
        ["PD nodes", str(told["pd_nodes"])],
        ["  that prefill", str(told["pd_prefill_nodes"])],
        ["  that decode", f"{told['pd_decode_nodes']} (batch {told['decode_batch']})"],
    ]
    if mixed is not None:
        made.append(["  that do both", f"1 ({mixed.prefill_share:.0%} prefill, batch {mixed.decode_batch})"])
    made += [
        ["threshold t, uncached tokens", f"{told['threshold_tokens']:,}"],
        ["requests prefilled remotely", f"{told['offloaded_share']:.1%}"],
        ["mean uncached prompt, tokens", _tokens(told["mean_tokens"])],
        ["  of remote / local requests", f"{_tokens(told['remote_tokens'])} / {_tokens(told['local_tokens'])}"],
        ["throughput, requests/s", f"{told['throughput_per_s']:.2f}"],
        ["  limited by", STAGES[sized.plan.throughput.binding]],
        [
            "stages, requests/s: remote prefill / PD prefill / decode",
            " / ".join(f"{told[f'theta_{stage}_per_s']:.2f}" for stage in ("prfaas", "pdp", "pdd")),
        ],
    ]
    if told["demand_per_s"] is not None:
        busy = "-" if told["busy_ratio"] is None else f"{told['busy_ratio']:.0%}"
        made.append(["demand, requests/s", f"{told['demand_per_s']:g} ({busy} of the throughput)"])
    return [
        *made,
        [
            "over the link, Gbps: mean / all instances busy",
            f"{told['egress_gbps']:.2f} / {told['egress_peak_gbps']:.2f}",
        ],
        [
            "line to order, Gbps",
            f"{told['recommended_line_gbps']:.2f}" + ("" if link is None else f" (there: {link:g})"),
        ],
        ["cost", f"{told['cost']:g}"],
    ]


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def notes(sized: Sized) -> list[str]:
    """What the figures do not say by themselves."""
    found = []
    if sized.fleet.n_prfaas and not sized.plan.throughput.costs.offloaded_share:
        found.append("No request is worth sending: the PrfaaS instances would stand idle.")
    link = sized.fleet.link_bytes_per_s
    if link is not None and sized.peak_gbps * GBPS > link:
        found.append("With all instances busy more is made than the line carries: t will rise at such moments.")
    if sized.fleet.decode.step_s(1) > sized.fleet.step_limit_s:
        found.append("Not even one sequence decodes within --step-limit-ms: batch 1 is assumed.")
    if sized.wanted.lengths.longest_tokens > sized.fleet.prfaas.prefill.xs[-1]:
        found.append("Some prompts are longer than the profile was measured: its last slope is drawn on.")
    return found
