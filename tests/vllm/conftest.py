"""Clusters whose engines are vLLM servers, and the server alone that their answers are compared with.

vLLM lives in an environment of its own, which `make vllm-venv` makes; VLLM_PYTHON names another one.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from services.local_cluster import LocalCluster, Plan, Wan, local_cluster
from tests.vllm.damage import Damage
from tests.vllm.engine import Engine, engine

PYTHON = os.environ.get("VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
#: Of all servers: one core each, and little memory.
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
WORDS = ("--max-model-len", "8192", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--enforce-eager")
#: Of each model, what its servers are started with. vLLM's prefix cache ends a Nemotron-H on a CPU; of a Qwen3-Next it
#: would have prompts that are to be computed again.
MODELS = {
    "qwen3": ("--dtype", "float32", *WORDS),
    "nemotron_h": ("--dtype", "float32", "--no-enable-prefix-caching", *WORDS),
    "qwen3_next": ("--dtype", "bfloat16", "--no-enable-prefix-caching", *WORDS),
}
#: Those that give the same tokens however they are batched.
EXACT = ("qwen3", "nemotron_h")
START_S = 900.0


class StartCluster(Protocol):
    """`prefill_options`, `decode_options`: more of them for the workers. `changes`: to the plan."""

    def __call__(
        self,
        family: str,
        wan: Wan | None = None,
        prefill_options: tuple[str, ...] = (),
        decode_options: tuple[str, ...] = (),
        **changes: Any,
    ) -> AbstractAsyncContextManager[LocalCluster]: ...


StartEngine = Callable[[str], AbstractAsyncContextManager[Engine]]


@pytest.fixture(scope="session", autouse=True)
def _surroundings() -> None:
    os.environ.update(SURROUNDINGS)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family, with random weights, built once."""
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp("models") / family
            script = Path(__file__).with_name("build_model.py")
            subprocess.run([PYTHON, str(script), family, str(built[family])], check=True, timeout=START_S)
        return built[family]

    return build


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> StartCluster:
    """A region that prefills and one that decodes, with a vLLM server each."""

    @asynccontextmanager
    async def begin(
        family: str,
        wan: Wan | None = None,
        prefill_options: tuple[str, ...] = (),
        decode_options: tuple[str, ...] = (),
        **changes: Any,
    ) -> AsyncIterator[LocalCluster]:
        words = (f"--vllm-arguments={word}" for word in MODELS[family])
        extra = ("--engine", "vllm", "--vllm-python", PYTHON, *words)
        plan = Plan(
            model_dir=model_dir(family),
            threshold_tokens=0,
            rebalance=False,
            wan=wan,
            pd_roles=("mixed",),
            log_dir=tmp_path_factory.mktemp("logs"),
            ready_timeout_s=START_S,
            extra={"prefill-worker": (*extra, *prefill_options), "decode-worker": (*extra, *decode_options)},
        )
        async with local_cluster(replace(plan, **changes)) as cluster:
            yield cluster

    return begin


@pytest.fixture(scope="session")
def alone(model_dir: Callable[[str], Path]) -> StartEngine:
    """One server behind the messages of an engine process."""
    return lambda family: engine(sys.executable, PYTHON, model_dir(family), MODELS[family])


@pytest.fixture(scope="session")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Damage:
    """What a decode worker that is started with its Python loads can be damaged."""
    return Damage(PYTHON, tmp_path_factory.mktemp("damage"))
