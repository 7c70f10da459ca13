"""A vLLM server that nobody of ours started, with our connector or without it, and its own counters."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.engine.vllm.completions import ServerError, get
from prfaas.process import end
from tests.vllm.engine import START_S, STOP_S

ROOT = Path(__file__).parents[2]
COUNTED_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """`folder` has its sockets."""

    folder: Path

    @property
    def api(self) -> Path:
        return self.folder / "api"

    @property
    def bridge(self) -> Path:
        return self.folder / "bridge"

    @property
    def options(self) -> tuple[str, ...]:
        """Of an engine process that is attached to it."""
        events = (f"--event=ipc://{self.folder}/events", f"--event=ipc://{self.folder}/replay")
        return ("--server", str(self.api), "--bridge", str(self.bridge), *events)

    async def counted(self, name: str) -> float:
        page = (await get(self.api, "/metrics")).decode()
        lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def counts(self, name: str, value: float) -> None:
        """Until it does: it counts a request a moment after its answer."""
        try:
            async with asyncio.timeout(COUNTED_S):
                while await self.counted(name) != value:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{name} is {await self.counted(name)}, not {value}") from None


@asynccontextmanager
async def served(python: str, model_dir: Path, words: Sequence[str], folder: Path) -> AsyncIterator[Server]:
    """Running and healthy."""
    server = Server(folder)
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.engine.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"bridge": str(server.bridge), "stays": True},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--uds", str(server.api)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *words),
        *("--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)),
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(START_S):
            while not await _healthy(server):
                assert process.returncode is None, "the server ended while it started"
                await asyncio.sleep(0.5)
        yield server
    finally:
        await end(process, STOP_S, signal.SIGTERM)


async def _healthy(server: Server) -> bool:
    try:
        await get(server.api, "/health")
    except (OSError, ServerError):
        return False
    return True
