"""A vLLM server of our own: started with the connector, on Unix sockets in a folder that is ours alone."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from prfaas.engine.vllm.completions import ServerError, get
from prfaas.engine.vllm.kv_events import Endpoints
from prfaas.engine.vllm.own_network import beside
from prfaas.engine.vllm.prefix_watch import can_watch
from prfaas.errors import ConfigError
from prfaas.process import die_with_parent, end

SERVED_NAME = "model"
CONNECTOR = "prfaas.engine.vllm.connector"
#: What is named when a server does not start, and has not said why.
ARGUMENTS = "worker.vllm_arguments"
#: Loading a large model takes minutes.
START_S = 1800.0
PAUSE_S = 0.2
STOP_GRACE_S = 10.0
NOTHING: Mapping[str, str] = MappingProxyType({})

_PACKAGE = Path(__file__).parents[2]


def api_socket(folder: Path) -> Path:
    return folder / "api.sock"


def bridge_socket(folder: Path) -> Path:
    return folder / "bridge.sock"


def endpoints(folder: Path) -> Endpoints:
    return Endpoints(f"ipc://{folder / 'events.sock'}", f"ipc://{folder / 'replay.sock'}")


def command(python: str, model_dir: Path, folder: Path, arguments: Sequence[str], network: str = "") -> list[str]:
    """What starts the server. `arguments` come last but for transfer and events, and so win. `network`: the engines'
    own."""
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"bridge": str(bridge_socket(folder))},
    }
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir), "--served-model-name", SERVED_NAME),
        *("--uds", str(api_socket(folder)), "--disable-uvicorn-access-log"),
        "--enable-prompt-tokens-details",
        *arguments,
        *("--kv-transfer-config", msgspec.json.encode(beside(transfer, network)).decode()),
        *("--kv-events-config", msgspec.json.encode(_events(folder)).decode()),
    ]


def _events(folder: Path) -> dict[str, Any]:
    """Without them the server keeps no list of what became of its cache."""
    own = endpoints(folder)
    return {
        "enable_kv_cache_events": can_watch(),
        "publisher": "zmq" if can_watch() else "null",
        "endpoint": own.events,
        "replay_endpoint": own.replay,
    }


@asynccontextmanager
async def running(
    words: Sequence[str], folder: Path, more: Mapping[str, str] = NOTHING
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The server's process; it finds the connector in the sources that we run from, and dies with us. The folder is
    gone at the end. `more`: of its surroundings."""
    # That package alone: what is installed beside it would come before the server's own.
    sources = folder / "sources"
    sources.mkdir()
    (sources / _PACKAGE.name).symlink_to(_PACKAGE)
    paths = (str(sources), os.environ.get("PYTHONPATH", ""))
    surroundings = os.environ | {
        **more,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Sockets and files of its processes, which it leaves behind when it is killed.
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    parent = os.getpid()
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=surroundings,
            stdin=asyncio.subprocess.DEVNULL,
            # What it says is its log, and no answer of whoever started us.
            stdout=sys.stderr.fileno(),
            # The terminal's signals are the node's to answer; what we ignore, the server must not.
            start_new_session=True,
            preexec_fn=partial(_prepare, parent),
        )
    except OSError as error:
        raise ConfigError("worker.vllm_python", f"{words[0]} cannot be started: {error.strerror}") from error
    try:
        yield process
    finally:
        # First, because the node waits for us less long than we for the server, which dies with us.
        shutil.rmtree(folder, ignore_errors=True)
        await end(process, STOP_GRACE_S)


def _prepare(parent: int) -> None:
    die_with_parent(parent=parent)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


def ended_early(code: int) -> str:
    return f"the server ended with {code} while it started; its log says why"


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """What a server does until it serves. Raises ConfigError when that takes too long."""
    try:
        async with asyncio.timeout(START_S):
            yield
    except TimeoutError:
        raise ConfigError(ARGUMENTS, f"the server was not ready after {START_S:.0f} s") from None


async def until_healthy(process: asyncio.subprocess.Process, folder: Path) -> None:
    """Raises ConfigError when the server ends instead."""
    while not await _healthy(folder):
        if process.returncode is not None:
            raise ConfigError(ARGUMENTS, ended_early(process.returncode))
        await asyncio.sleep(PAUSE_S)


async def _healthy(folder: Path) -> bool:
    try:
        await get(api_socket(folder), "/health")
    except (OSError, ServerError):
        return False
    return True
