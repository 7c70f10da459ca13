"""The router's side: legs over one link, and what both processes' CPU was while they were used."""

import asyncio
import struct
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from bench.token_link.plan import LIFE, WORKER, Scenario, identity
from prfaas.cluster import Namespace, RegionId
from prfaas.live.link import LinkParams, TokenLink
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.request import AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Decode, Prefill, Reserve, Tokens
from prfaas.rpc.identity import dial
from prfaas.security import PeerRole

PROMPT_TOKENS = 64
#: How often a stream shows that it is alive.
EVERY_S = 1.0
ATTEMPTS = count(1)


def link(adapter: str, ports: dict[str, int], certificates: Path | None, counters: LinkCounters) -> TokenLink:
    own, peer = identity(certificates, PeerRole.ROUTER) if certificates else None, PeerRole.DECODE_WORKER
    address, params = f"127.0.0.1:{ports[adapter]}", LinkParams()
    if adapter == "tcp":
        return TcpTokenLink(address, WORKER, LIFE, params=params, counters=counters, identity=own, peer=peer)
    channel = partial(dial, own, peer)
    return GrpcTokenLink(address, WORKER, LIFE, params=params, counters=counters, channel=channel)


async def measure(over: TokenLink, scenario: Scenario, worker: int) -> tuple[float, float]:
    """CPU seconds of this process and of the worker's while the scenario ran."""
    ours, theirs = time.process_time(), cpu_s(worker)
    requests = iter(range(scenario.total))
    async with asyncio.TaskGroup() as group:
        for _ in range(scenario.streams):
            group.create_task(_client(over, scenario, requests))
    return time.process_time() - ours, cpu_s(worker) - theirs


async def _client(over: TokenLink, scenario: Scenario, requests: Iterator[int]) -> None:
    for number in requests:
        await _request(over, scenario, number)


async def _request(over: TokenLink, scenario: Scenario, number: int) -> None:
    attempt = AttemptId(f"{next(ATTEMPTS):032x}")
    first_ms = 0 if scenario.together else number * scenario.gap_ms // max(1, scenario.streams)
    prompt = struct.pack(f"<{PROMPT_TOKENS}I", scenario.tokens, scenario.gap_ms, first_ms, *range(PROMPT_TOKENS - 3))
    leg = await over.open(attempt, scenario.tokens + 3)
    request = RequestId(attempt)
    leg.send(
        Reserve(
            request_id=request,
            prompt=prompt,
            sampling=Sampling(max_tokens=scenario.tokens),
            source_node=WORKER,
            source_region=RegionId("b"),
            source_namespace=Namespace("n"),
            deadline_s=3600.0,
        )
    )
    await leg.next()
    leg.send(Prefill(request_id=request, prompt=prompt, destination=None, deadline_s=3600.0))
    await leg.next()
    leg.send(Decode())
    taken: list[bytes] = []
    if scenario.gap_ms:
        # As the router does with a stream that its client reads.
        leg.divert(lambda tokens, _now_s: taken.append(tokens) is None, EVERY_S)
    while isinstance(answer := await leg.next(), Tokens):
        taken.append(answer.tokens)
    leg.close()
    assert len(taken) == scenario.tokens, len(taken)


def cpu_s(pid: int) -> float:
    """All that a process has used, to the nanosecond: Linux has a clock of each."""
    return time.clock_gettime((~pid << 3) | 2)
