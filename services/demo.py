"""`prfaas demo`: a cluster of two regions, one short and one long prompt, their answers and receipts."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.http_client import Answer, AnswerFailed, chat, fetch
from services.local_cluster import Plan, Wan, check_settings, local_cluster

THRESHOLD_TOKENS = 512
MAX_TOKENS = 48
WAN = Wan(mbit=200, rtt_ms=30)
QUESTION = "What does the keeper write down each night?"
STORY = (
    "The keeper of the north light climbs the stair at dusk, trims the lamp and looks over the water. "
    "Ships pass from the far harbour to the near one, and each has her own pattern of lights. "
    "He writes the hour, the wind and the name of every ship into the book, and wakes when the bell rings. "
)
PROMPTS = {"short": QUESTION, "long": STORY * 24 + QUESTION}


@dataclass(frozen=True, slots=True)
class Shown:
    """One prompt's answer with its receipt."""

    text: str
    receipt: Mapping[str, Any]

    def summary(self) -> dict[str, Any]:
        names = ("path", "uncached_tokens", "kv_bytes", "recomputed_tokens", "ttft_seconds")
        return {name: self.receipt[name] for name in names} | {"text": self.text}


async def run(model_dir: Path, model: str, console: Console, log_dir: Path) -> dict[str, Shown]:
    """Start the cluster, ask both prompts one after the other, stop the cluster."""
    plan = Plan(model_dir=model_dir, threshold_tokens=THRESHOLD_TOKENS, wan=WAN, pools=1, log_dir=log_dir)
    check_settings(plan)
    with console.status("starting 1 router, 1 prefill worker in region a, 2 PD nodes in region b, a WAN between them"):
        starting = local_cluster(plan)
        cluster = await starting.__aenter__()
    try:
        console.print(f"cluster is up at {cluster.endpoint}/v1 (logs in {log_dir})")
        return await asyncio.to_thread(ask, cluster.endpoint, model, console)
    finally:
        await starting.__aexit__(None, None, None)


def ask(endpoint: str, model: str, console: Console) -> dict[str, Shown]:
    """Both prompts, one after the other, to a cluster that is up. Raises OSError and AnswerFailed."""
    return {name: _ask(endpoint, model, name, prompt, console) for name, prompt in PROMPTS.items()}


def served_model(endpoint: str) -> str:
    """The first model that the endpoint serves. Raises OSError, and AnswerFailed when there is none."""
    status, body = fetch(f"{endpoint.rstrip('/').removesuffix('/v1')}/v1/models")
    if status != HTTPStatus.OK:
        raise AnswerFailed(f"/v1/models answers {status}: {body[:300]}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise AnswerFailed("it serves no model") from error


def _ask(endpoint: str, model: str, name: str, prompt: str, console: Console) -> Shown:
    console.print(f"\n[bold]{name} prompt[/] ({len(prompt):,} characters)")
    return _stream(endpoint, model, prompt, console)


def _stream(endpoint: str, model: str, prompt: str, console: Console) -> Shown:
    answer = Answer()
    with Live(console=console, refresh_per_second=12) as live:
        for answer in chat(endpoint, model, prompt, MAX_TOKENS):
            live.update(Text(answer.text, style="cyan"))
    return Shown(answer.text, answer.receipt)


def receipts(shown: Mapping[str, Shown]) -> Table:
    """The receipts side by side."""
    table = Table("receipt", *shown, title="where each prompt was prefilled, and what that cost")
    for title, name in (
        ("path", "path"),
        ("why", "reason"),
        ("prefilled on", "prefill"),
        ("decoded on", "decode"),
        ("threshold t (tokens)", "threshold_tokens"),
        ("uncached (tokens)", "uncached_tokens"),
        ("KV that crossed (bytes)", "kv_bytes"),
        ("recomputed on decode (tokens)", "recomputed_tokens"),
        ("TTFT (seconds)", "ttft_seconds"),
    ):
        table.add_row(title, *(_cell(one.receipt[name]) for one in shown.values()))
    table.add_section()
    for term in next(iter(shown.values())).receipt["ttft_account"]:
        table.add_row(f"  {term}", *(_cell(one.receipt["ttft_account"][term]) for one in shown.values()))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def problems(shown: Mapping[str, Shown]) -> list[str]:
    """What is not as promised; empty when the demo has shown its point."""
    short, long = shown["short"].receipt, shown["long"].receipt
    checks = {
        "the short prompt stays local": short["path"] == "local" and short["kv_bytes"] == 0,
        "the long prompt is prefilled remotely": long["path"] == "remote" and long["kv_bytes"] > 0,
        "decode recomputes one token of the long prompt": long["recomputed_tokens"] == 1,
        "both prompts are answered": all(one.text for one in shown.values()),
    }
    return [f"not so: {promise}" for promise, kept in checks.items() if not kept]
