"""The options of `prfaas bench`."""

from pathlib import Path
from typing import Any

import click

from prfaas.errors import ConfigError
from services.option_types import Finite, bearer_key, http_url
from services.sim_cli import TRACE_FORMATS

LENGTHS = "TOKENS|MU,SIGMA,LOW,HIGH"
ABOVE_0 = Finite(min=0, min_open=True)
#: Of an id of a token: what the widest integers of any server hold.
TOKEN_ID = click.IntRange(0, (1 << 31) - 1)


def lengths(ctx: click.Context, param: click.Parameter, value: str) -> Any:
    """A number of tokens, or `MU,SIGMA,LOW,HIGH` of a log-normal distribution cut to bounds."""
    import msgspec

    from prfaas.sim.workload import Fixed, LogNormal

    try:
        match value.split(","):
            case [tokens]:
                return msgspec.convert({"kind": "fixed", "tokens": int(tokens)}, Fixed)
            case [mu, sigma, low, high]:
                told = {"mu": float(mu), "sigma": float(sigma), "low_tokens": int(low), "high_tokens": int(high)}
                return msgspec.convert({"kind": "log_normal", **told}, LogNormal)
            case _:
                raise ValueError("neither TOKENS nor MU,SIGMA,LOW,HIGH")
    except (ValueError, ConfigError) as error:
        raise click.BadParameter(f"{value}: {error}", ctx, param) from None


OPTIONS = (
    click.option(
        "--endpoint",
        required=True,
        type=http_url,
        metavar="URL",
        help="Of any OpenAI server, as http://127.0.0.1:8000.",
    ),
    click.option(
        "--key",
        default="",
        type=bearer_key,
        metavar="TEXT",
        envvar="PRFAAS_API_KEY",
        help="Its API key. [PRFAAS_API_KEY]",
    ),
    click.option("--model", help="[default: the one that /v1/models lists]"),
    click.option(
        "--api",
        type=click.Choice(["tokens", "text", "chat"]),
        default="tokens",
        show_default=True,
        help="tokens: completions of token lists, of exact length. text, chat: words, about one token each.",
    ),
    click.option(
        "--rate",
        "rates",
        envvar="PRFAAS_BENCH_RATE",
        multiple=True,
        type=ABOVE_0,
        metavar="PER_S",
        help="Requests per second; repeat it for a sweep. [default: 1, or that of the trace]",
    ),
    click.option("--find-max", is_flag=True, help="Look for the highest rate within the SLO, from --rate on."),
    click.option("--precision", type=ABOVE_0, default=0.1, show_default=True, help="Of that rate, as a share of it."),
    click.option(
        "--prompts",
        callback=lengths,
        metavar=LENGTHS,
        default="1024",
        show_default=True,
        help="Prompt lengths, tokens.",
    ),
    click.option("--outputs", callback=lengths, metavar=LENGTHS, default="128", show_default=True, help="max_tokens."),
    click.option(
        "--cv",
        type=Finite(0.01, 100),
        default=1.0,
        show_default=True,
        help="Of the times between arrivals: 1 is a Poisson process, more is burstier.",
    ),
    click.option(
        "--trace",
        type=click.Path(path_type=Path, exists=True),
        help="Lengths, arrivals and shared prefixes of a trace, stretched to --rate.",
    ),
    click.option("--trace-format", type=click.Choice(TRACE_FORMATS), default="request_log", show_default=True),
    click.option("--max-context-tokens", type=click.IntRange(2), default=131072, show_default=True),
    click.option("--duration-s", type=ABOVE_0, default=30.0, show_default=True, help="Measured time of each rate."),
    click.option("--requests", type=click.IntRange(1), help="At most so many per rate, warm-up included."),
    click.option("--warm-up-s", type=Finite(min=0), default=0.0, show_default=True, help="Sent, not measured."),
    click.option("--timeout-s", type=ABOVE_0, default=120.0, show_default=True, help="Of a whole answer."),
    click.option("--max-in-flight", type=click.IntRange(1), default=4096, show_default=True),
    click.option("--slo-ttft-ms", type=ABOVE_0, default=2000.0, show_default=True, help="Time to the first token."),
    click.option(
        "--slo-itl-ms", type=ABOVE_0, default=50.0, show_default=True, help="Mean time between a request's tokens."
    ),
    click.option(
        "--slo-share",
        type=Finite(0, 1, min_open=True),
        default=0.9,
        show_default=True,
        help="Of the requests must be good for a rate to meet the SLO.",
    ),
    click.option("--low-token", type=TOKEN_ID, default=3, show_default=True, help="Lowest id in prompts."),
    click.option("--high-token", type=TOKEN_ID, default=499, show_default=True, help="Highest id in prompts."),
    click.option("--ignore-eos", is_flag=True, help="Ask for outputs of full length; not every server knows how."),
    click.option("--seed", type=int, default=1, show_default=True, help="Of arrivals, lengths and prompts."),
    click.option(
        "--report",
        "page",
        envvar="PRFAAS_BENCH_REPORT",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write an HTML page here.",
    ),
    click.option("--json", "as_json", envvar="PRFAAS_BENCH_JSON", is_flag=True, help="Print the figures as JSON."),
)


def bench_options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command
