"""A connector that does not serve its server says so to the engine process, which says so to the node."""

import asyncio
import socket
from pathlib import Path

import pytest

from prfaas.engine import messages
from prfaas.engine.vllm.compatibility import findings
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.facts import Facts
from prfaas.engine.vllm.refuse import Unsupported, refusals_told
from prfaas.engine.vllm.rule import Verdict
from prfaas.errors import ConfigError
from prfaas.ipc import AsyncChannel
from prfaas.node.engine_client import EngineClient


def refuse(bridge: Path, **otherwise: int) -> None:
    with refusals_told(str(bridge)):
        raise Unsupported.because(findings(Facts(**otherwise), Verdict.REFUSED))


async def test_the_reason_crosses_the_bridge(tmp_path: Path):
    """As an error of the setting that it came by, with all that is to be changed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "bridge"))
    listener.listen(1)
    listener.setblocking(False)
    accepted = asyncio.create_task(Bridge.accept(listener, (), lambda news: None))
    with pytest.raises(Unsupported, match="--tensor-parallel-size \\(2\\)"):
        await asyncio.to_thread(refuse, tmp_path / "bridge", tensor_parallel=2, pipeline_parallel=4)
    with pytest.raises(ConfigError) as refused:
        await accepted
    assert refused.value.path == "worker.vllm_arguments"
    assert "--tensor-parallel-size (2)" in refused.value.message
    assert "--pipeline-parallel-size (4)" in refused.value.message
    listener.close()


def test_a_server_that_nobody_hears_ends_all_the_same(tmp_path: Path):
    """The reason is then in its log alone."""
    with pytest.raises(Unsupported):
        refuse(tmp_path / "nobody", data_parallel=2)


async def test_an_unfit_engine_is_an_error_of_its_setting():
    """The node ends with the setting's name, not with the news that a process is gone."""
    ours, theirs = socket.socketpair()
    engine = EngineClient("node", await AsyncChannel[messages.Event].over(ours, messages.Event))
    there = await AsyncChannel[messages.Command].over(theirs, messages.Command)
    there.send(messages.Unfit("worker.vllm_python", "it has no vLLM"))
    with pytest.raises(ConfigError, match=r"worker\.vllm_python: it has no vLLM"):
        async with asyncio.timeout(10):
            await engine.run()
    there.close()
