"""`prfaas status` and `prfaas bench` on a cluster at work."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner

from services.cli import main
from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import LIVENESS_S, metrics, total
from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sesame"
#: Long prompts and short ones: t is between them.
SHORT, LONG = 200, 3000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(start_embedded: StartCluster, model_dir: Callable[[str], Path]) -> AsyncIterator[LocalCluster]:
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=1000, admin_key=KEY, rebalance=False)
    async with start_embedded(plan) as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


async def prfaas(*arguments: str, code: int = 0) -> str:
    """What a command prints; on an error, to stderr."""
    done = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def reads(cluster: LocalCluster) -> list[str]:
    return ["status", "--admin", cluster.admin["router"], "--key", KEY]


async def test_a_bench_counts_what_the_router_counts(cluster: LocalCluster, tmp_path: Path):
    """Requests by path and tokens of output are the router's own; its time to the first token is within what the
    client saw; the report loads nothing."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 60 * n, "input_length": LONG if n % 3 == 0 else SHORT, "output_length": 4} for n in range(24)
    ]
    trace.write_text("".join(json.dumps({**line, "hash_ids": []}) + "\n" for line in lines))
    before = await metrics(cluster, "router")
    page = tmp_path / "bench.html"
    told = json.loads(
        await prfaas(
            *("bench", "--endpoint", cluster.endpoint, "--trace", str(trace), "--trace-format", "mooncake"),
            *("--rate", "15", "--report", str(page), "--json", "--ignore-eos", "--slo-ttft-ms", "10000"),
            *("--slo-itl-ms", "10000"),
        )
    )
    [run] = told["runs"]
    after = await metrics(cluster, "router")

    def counted(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert (run["sent"], run["completed"], run["failed"]) == (24, 24, {})
    assert run["offered_per_s"] == pytest.approx(15, rel=0.1)
    remote = counted("prfaas_router_requests_total", path="remote")
    assert (remote, counted("prfaas_router_requests_total", path="local")) == (8, 16)
    assert run["output_tokens"] == 24 * 4 == counted("prfaas_router_output_tokens_total")
    assert run["prompt_tokens"] == 8 * LONG + 16 * SHORT
    routers_mean = counted("prfaas_router_ttft_seconds_sum") / counted("prfaas_router_ttft_seconds_count")
    assert 0 < routers_mean <= run["ttft_seconds"]["mean"]
    assert run["meets_slo"] and told["highest_rate_within_slo_per_s"] == 15
    text = page.read_text()
    assert text.count("<svg") == 4 and not re.search(r"(src|href)=|url\(|<script", text)


async def test_the_highest_rate_within_the_slo_is_found(cluster: LocalCluster):
    """From a rate that is too high downwards: no rate meets a bound that nobody can."""
    asked = ["bench", "--endpoint", cluster.endpoint, "--rate", "20", "--prompts", "50", "--outputs", "2", "--json"]
    asked += ["--duration-s", "0.6", "--find-max", "--requests", "4"]
    told = json.loads(await prfaas(*asked, "--slo-ttft-ms", "0.001"))
    assert told["highest_rate_within_slo_per_s"] is None
    rates = [run["rate_per_s"] for run in told["runs"]]
    assert len(rates) > 1 and all(later == earlier / 2 for earlier, later in itertools.pairwise(rates))


async def test_one_screen_shows_the_whole_cluster(cluster: LocalCluster):
    """Workers, roles, t and why, regions, cache, paths; as JSON the state that the live page shows."""
    shown = await prfaas(*reads(cluster), "--once")
    for word in (
        "prefill-0",
        "decode-0",
        "decode-1",
        "leader ",
        "t 1,000",
        "cache shards",
        "TTFT p50",
    ):
        assert word in shown, shown
    told = json.loads(await prfaas(*reads(cluster), "--json"))
    [router] = told["routers"]
    assert {node["id"] for node in router["state"]["nodes"]["shown"]} == {"prefill-0", "decode-0", "decode-1"}
    assert told["requests"]["by_path"]["remote"] >= 1 and told["rates"]["remote_per_s"] == 0


async def test_nobody_there_and_a_wrong_key_say_so(cluster: LocalCluster):
    """Exit code 1, and one line."""
    gone = "http://127.0.0.1:1"
    assert "no answer" in await prfaas("status", "--admin", gone, "--key", KEY, code=1)
    wrong = await prfaas("status", "--admin", cluster.admin["router"], "--key", "no", code=1)
    assert "key" in wrong.lower() and "Traceback" not in wrong
    assert "no answer" in await prfaas("bench", "--endpoint", gone, code=1)
    shown = await prfaas(*reads(cluster), "--admin", gone, "--once")
    assert "decode-0" in shown and f"router {gone}: no answer" in shown


@contextlib.contextmanager
def on_terminal(arguments: Sequence[str], columns: int, lines: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command on a terminal of that size."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    process = subprocess.Popen(arguments, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    try:
        yield process, own
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(own)


def until(terminal: int, there: Callable[[str], bool]) -> str:
    """What is written to it until that is there."""
    written, deadline = b"", time.monotonic() + LIVENESS_S
    os.set_blocking(terminal, False)
    while not there(written.decode(errors="replace")):
        assert time.monotonic() < deadline, written.decode(errors="replace")
        try:
            written += os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break
    return written.decode(errors="replace")


@pytest.mark.parametrize("columns", [120, 44])
async def test_a_terminal_gets_a_live_screen(cluster: LocalCluster, columns: int):
    """On the terminal's other screen, drawn over in place and never cleared; lines fit; Ctrl-C gives the terminal
    back and is no failure."""

    def watched() -> tuple[str, int]:
        with on_terminal(command(*reads(cluster), "--interval-s", "0.2"), columns, 40) as (process, terminal):
            written = until(terminal, lambda text: text.count("decode-0") >= 3 and "requests/s local" in text)
            process.send_signal(signal.SIGINT)
            written += until(terminal, lambda text: "\x1b[?1049l" in text)
            return written, process.wait(LIVENESS_S)

    written, code = await asyncio.to_thread(watched)
    assert code == 0
    assert written.count("\x1b[?1049h") == 1 and written.count("\x1b[2J") <= 1
    # Each frame begins at the upper left.
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.replace("\x1b[H", "\n"))
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", plain)) <= columns
    assert "Traceback" not in plain and "prefill-0" in plain
