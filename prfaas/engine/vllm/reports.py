"""What runs beside a vLLM engine process's work: its load to the node, the server's counters, the server's cache."""

import asyncio

import structlog

from prfaas.engine.messages import Command
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.completions import Address, ServerError, get
from prfaas.engine.vllm.server_metrics import read
from prfaas.ipc import AsyncChannel

LOAD_INTERVAL_S = 0.25
#: How often the server is asked for its counters.
COUNT_INTERVAL_S = 1.0
ANSWER_S = 10.0

log = structlog.get_logger()


async def report(adapter: Adapter, node: AsyncChannel[Command]) -> None:
    while True:
        node.send(adapter.load())
        await asyncio.sleep(LOAD_INTERVAL_S)


async def count(adapter: Adapter, api: Address) -> None:
    """A server that does not answer is not counted; whether it lives is seen elsewhere."""
    while True:
        before = adapter.in_hand
        try:
            async with asyncio.timeout(ANSWER_S):
                counted = read(await get(api, "/metrics"))
        except (ServerError, OSError, TimeoutError, ValueError) as error:
            log.warning("the server's counters cannot be read", error=str(error))
            adapter.counted(None, before)
        else:
            adapter.counted(counted, before)
        await asyncio.sleep(COUNT_INTERVAL_S)
