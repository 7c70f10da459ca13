"""One screen of `prfaas status`, made of a reading. Narrow terminals see fewer columns, small ones fewer workers."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.status.reading import Reading, hints, rates

#: Columns of workers, with the width of the terminal from which on they are shown.
WORKER_COLUMNS = {
    "worker": 0,
    "region": 60,
    "role": 0,
    "state": 0,
    "queue": 0,
    "decoding": 50,
    "busy p/d": 70,
    "KV used": 80,
    "epoch": 90,
    "sends MB/s": 100,
}
#: Lines that are not workers: below this many a screen shows a few all the same.
OTHER_LINES, FEWEST = 22, 5
#: Shards whose copies are not current, told one by one.
WORST_SHARDS = 3
BAD, GOOD, DIM = "bold red", "green", "dim"


def screen(reading: Reading, before: Reading | None, width: int, height: int | None) -> RenderableType:
    """`height` None: as long as it takes."""
    state = reading.main
    found = hints(reading, before)
    # Near the top, where no terminal is too small for it.
    hinted = [Text(f"! {hint}", style=BAD, overflow="fold") for hint in found]
    hinted = hinted or [Text("nothing to look at", style=GOOD)]
    if state is None:
        return Group(*hinted)
    parts: list[RenderableType] = [_head(reading, state), *hinted, *_routing(state), _links(state, width)]
    most = None if height is None else max(FEWEST, height - OTHER_LINES - len(found))
    parts += [*_requests(reading, before), _regions(state, width), _workers(reading, state, width, most)]
    return Group(*parts, *_cache(state))


def _head(reading: Reading, state: Mapping[str, Any]) -> Text:
    router, plan = state["router"], state["plan"]
    answering, known = len(reading.states), state["routers"]["total"]
    epoch = plan["epoch"] if plan["epoch"] is not None else "-"
    head = Text(f"{router['cluster']} · {router['model']} · ", style="bold", overflow="fold")
    head.append(f"routers {known}, {answering} answering · leader {router['leader'] or 'NONE'} · plan epoch {epoch}")
    return head


def _routing(state: Mapping[str, Any]) -> Iterator[Text]:
    threshold = state["threshold"]
    decision = threshold["decision"]
    why = "pinned" if threshold["pinned"] else decision["reason"] if decision else "start"
    line = f"t {threshold['effective_threshold_tokens']:,} tokens · mode {threshold['mode']} · because {why}"
    line += f" · cache transfer {'on' if threshold['abundant'] else 'off'}"
    yield Text(line, overflow="fold")
    if (last := state["plan"]["last_round"]) is not None:
        yield Text(f"planner: {last['outcome']}, {last['reason']}", style=DIM, overflow="fold")


def _links(state: Mapping[str, Any], width: int) -> RenderableType:
    links = state["links"]["shown"]
    if not links:
        return Text("no link between regions has been measured", style=DIM)
    table = _table(["link", "Mbit/s", "used", "RTT ms", *(["queued MB", "lost"] if width >= 70 else [])])
    for link in links[:8]:
        used = link["utilization"]
        row: list[RenderableType] = [
            f"{link['source']} → {link['target']}",
            _scaled(link["capacity_bytes_per_s"], 8e-6),
            Text(_share(used), style=BAD if used is not None and used >= 0.85 else ""),
            _scaled(link["rtt_s"], 1e3),
        ]
        more = [_scaled(link["queued_bytes"], 1e-6), _share(link["retransmitted_ratio"])]
        table.add_row(*row, *(more if width >= 70 else []))
    return table


def _requests(reading: Reading, before: Reading | None) -> Iterator[Text]:
    totals = reading.requests()
    paths = totals["by_path"]
    if before is not None:
        now = rates(before, reading)
        told = f"requests/s local {now['local_per_s']:.2f} · remote {now['remote_per_s']:.2f}"
        yield Text(f"{told} · tokens/s {now['output_tokens_per_s']:.0f}", overflow="fold")
    p50, p90 = _seconds(totals["ttft_p50_seconds"]), _seconds(totals["ttft_p90_seconds"])
    yield Text(
        f"TTFT p50 {p50} · p90 {p90} ({totals['ttft_count']} in the last minute) · since start local"
        f" {paths.get('local', 0)}, remote {paths.get('remote', 0)}, failed {totals['failed']},"
        f" retried {totals['retried']}",
        overflow="fold",
    )
    breakers = sum(state["breakers"]["total"] for state in reading.states)
    if reading.shunned is None:
        canary = "not known"
    else:
        canary = f"{len(reading.shunned)} workers shunned" if reading.shunned else "none shunned"
    yield Text(f"breakers open {breakers} · canary {canary}", style=BAD if breakers or reading.shunned else "")


def _regions(state: Mapping[str, Any], width: int) -> RenderableType:
    table = _table(["region", "workers", "prefill/decode/mixed", "queued", *(["shards"] if width >= 60 else [])])
    for region in state["regions"][:10]:
        roles = region["roles"]
        row = [
            region["id"],
            str(region["nodes"]),
            f"{roles['prefill']}/{roles['decode']}/{roles['mixed']}",
            f"{region['queued_prefill_tokens']:,}",
        ]
        table.add_row(*row, *([str(region["shards"])] if width >= 60 else []))
    return table


def _workers(reading: Reading, state: Mapping[str, Any], width: int, most: int | None) -> RenderableType:
    columns = [name for name, least in WORKER_COLUMNS.items() if width >= least]
    nodes = state["nodes"]["shown"]
    shown = nodes if most is None else nodes[:most]
    table = _table(columns)
    for node in shown:
        told = _gone(node) if node["state"] == "gone" else _worker(node)
        if node["id"] in (reading.shunned or {}):
            told["state"] = "shunned"
        style = "" if told["state"] == "serving" else "yellow" if told["state"] in ("draining", "converting") else BAD
        table.add_row(*(told.get(name, "") for name in columns), style=style)
    left = state["nodes"]["total"] + state["nodes"]["gone"] - len(shown)
    return Group(table, Text(f"and {left} workers more", style=DIM)) if left > 0 else table


def _gone(node: Mapping[str, Any]) -> dict[str, str]:
    return {"worker": node["id"], "region": node["region"], "role": node["role"], "state": "gone"}


def _worker(node: Mapping[str, Any]) -> dict[str, str]:
    total = node["kv_total_bytes"]
    return {
        "worker": node["id"],
        "region": node["region"],
        "role": node["role"] if node["role"] != "mixed" else f"mixed {node['prefill_share']:.0%}",
        "state": node["state"],
        "queue": f"{node['queued_prefill_tokens']:,}",
        "decoding": f"{node['decoding']}/{node['max_batch']}" if node["max_batch"] else str(node["decoding"]),
        "busy p/d": f"{_share(node['prefill_busy_ratio'])} {_share(node['decode_busy_ratio'])}",
        "KV used": _share(1 - node["kv_free_bytes"] / total) if total else "-",
        "epoch": "-" if node["epoch"] is None else str(node["epoch"]),
        "sends MB/s": _scaled(node["sent_bytes_per_s"], 1e-6),
    }


def _cache(state: Mapping[str, Any]) -> Iterator[Text]:
    if (cache := state["cache"]) is None:
        yield Text("prefix cache off", style=DIM)
        return
    states = ", ".join(f"{count} {name}" for name, count in cache["states"].items() if count) or "none"
    yield Text(f"cache shards: {states} · index {cache['index_bytes'] / 1e6:.1f} MB", overflow="fold")
    worst = [shard for shard in cache["shards"]["shown"] if shard["state"] != "current"]
    for shard in worst[:WORST_SHARDS]:
        age, why = shard["age_seconds"], shard["behind"]
        told = "never heard of" if age is None else f"heard of {age:.0f} s ago"
        line = f"  {shard['id']} ({shard['region']}) is {shard['state']}: {told}"
        yield Text(f"{line}, began anew: {why}" if why else line, overflow="fold")


def _table(columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True, overflow="ellipsis")
    return table


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _scaled(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.1f}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
