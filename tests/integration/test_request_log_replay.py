"""What came to a router comes again in the simulator: its request log is a trace."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.sim.replay import replayed
from prfaas.sim.trace_files import TraceFormat
from prfaas.sim.workload import Arrival, Trace
from prfaas.tokenizer.text import load_tokenizer
from services.router.http.limits import Limits
from services.router.request_log import RequestLogFile
from services.sim_cli import sim
from tests.integration.router_under_test import ECHO, FULL, running_router
from tests.integration.wire import Wire
from tests.unit.tokenizer.byte_level import write_model_dir

CHATS, TURNS, TURN_TOKENS, GAP_S = 3, 4, 150, 60.0
SCENARIO = """
name = "replay"
[[fleets]]
name = "pd"
region = "b"
kind = "pd"
hardware = "h20"
nodes = 2
shares = [1.0]
cache_gib = 10.0
[workload.arrivals]
rate_per_s = 0.1
"""


def prompt(chat: int, turn: int) -> list[int]:
    """Each turn begins with all of the one before."""
    return [3 + (7 * chat + position) % 200 for position in range((turn + 1) * TURN_TOKENS)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Chats turn by turn, each an echo of up to five tokens, and one request that there was no room for."""
    (tmp_path / "model").mkdir()
    tokenizer, path = load_tokenizer(write_model_dir(tmp_path / "model")), tmp_path / "requests.jsonl"
    times = itertools.count(1e9, GAP_S)
    file = RequestLogFile(path, lambda tenant: b"salt", wall=lambda: next(times))
    with running_router(asyncio.new_event_loop, tokenizer, Limits()) as router, Wire(router.port) as wire:
        for turn, chat in itertools.product(range(TURNS), range(CHATS)):
            body = {"model": ECHO, "prompt": prompt(chat, turn), "max_tokens": 5, "stream": bool(chat % 2)}
            assert wire.ask("POST", "/v1/completions", body).status == 200
            file.put(router.log())
        assert wire.ask("POST", "/v1/completions", {"model": FULL, "prompt": [5]}).status == 503
        file.put(router.log())
    file.close()
    tokenizer.close()
    return path


def simulated(folder: Path, *options: str) -> dict[str, Any]:
    scenario = folder / "scenario.toml"
    scenario.write_text(SCENARIO)
    done = CliRunner().invoke(sim, ["run", str(scenario), "--json", *options])
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_a_request_log_is_replayed(log: Path, tmp_path: Path):
    """As many requests as were served, as long, at the same times, with the same beginnings in common; so the simulated
    caches find what real ones would have found. What was refused does not come again."""
    arrivals = replayed(Trace(path=str(log), format=TraceFormat.REQUEST_LOG), tmp_path, 1, 1 << 18)
    expected = [(chat, turn) for turn in range(TURNS) for chat in range(CHATS)]
    assert [each.prompt_tokens for each in arrivals] == [len(prompt(*one)) for one in expected]
    assert [each.output_tokens for each in arrivals] == [5] * len(expected)
    assert [round(each.at_s) for each in arrivals] == [round(GAP_S * number) for number in range(len(expected))]
    for (one, first), (other, second) in itertools.combinations(zip(expected, arrivals, strict=True), 2):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt(*one), prompt(*other), strict=False))
        assert shared_units(first, second) == len([*same]) // HASH_UNIT_TOKENS

    figures = simulated(tmp_path, "--trace", str(log))
    assert figures["completed"] == figures["offered"] > 0
    without = tmp_path / "without.jsonl"
    lines = [json.loads(line) | {"prefix": ""} for line in log.read_text().splitlines()]
    without.write_text("\n".join(map(json.dumps, lines)))
    bare = simulated(tmp_path, "--trace", str(without))
    assert bare["offered"] == figures["offered"]
    assert figures["prefill_skip_rate"] > 0.5 > bare["prefill_skip_rate"] == 0


def test_a_line_that_is_none_is_named(log: Path, tmp_path: Path):
    """With file and number."""
    with log.open("a") as file:
        file.write("{}\n")
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO)
    done = CliRunner().invoke(sim, ["run", str(scenario), "--trace", str(log)])
    assert done.exit_code == 2
    assert f"requests.jsonl:{CHATS * TURNS + 2}" in done.output


def shared_units(one: Arrival, other: Arrival) -> int:
    both = min(len(one.keys), len(other.keys))
    for at in range(0, both, KEY_BYTES):
        if one.keys[at : at + KEY_BYTES] != other.keys[at : at + KEY_BYTES]:
            return at // KEY_BYTES
    return both // KEY_BYTES
