"""Our pumps on loopback: engine memory to engine memory between two workers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.transport.cpu import cpu_s
from bench.transport.engine import Engine
from bench.transport.flows import Flow, drain, run_flows
from bench.transport.nodes import Node, Settings
from bench.transport.rate import Rate
from bench.transport.transfers import Driver, Transfer
from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec, chunk_ends
from prfaas.transfer.pump.messages import Integrity
from tools.wan.rig import Wan

#: Parts of 1 MiB without a gap between them, 64 MiB a sequence: two in flight are the pool that the others use.
LAYOUT = KvLayout(layers=((TensorSpec("latent", TensorKind.TOKENS, "bfloat16", (2048,)),),) * 16)
TOKENS, CHUNK_TOKENS = 1024, 256
DEPTH = 2
POOL_BYTES = DEPTH * LAYOUT.span_bytes(TOKENS)
#: Delivered before the clock starts, and while it runs.
_WARM_BYTES, _MEASURED_BYTES = 256 << 20, 2 << 30
NORMAL = 2


@dataclass(slots=True)
class Pair:
    """A source and a target, kept from round to round."""

    driver: Driver
    source: Node
    target: Node

    def transfer(self) -> Transfer:
        return bulk(self.source, self.target)


def bulk(
    source: Node,
    target: Node,
    *,
    tokens: int = TOKENS,
    urgency: int = NORMAL,
    tenant: str = "",
    weight: float = 1.0,
) -> Transfer:
    """A sequence that is complete before it is sent."""
    return Transfer(
        source=source,
        target=target,
        tokens=tokens,
        chunk_ends=chunk_ends(tokens, CHUNK_TOKENS),
        urgency=urgency,
        tenant=tenant,
        weight=weight,
    )


@contextmanager
def loopback_pair(wan: Wan, integrity: Integrity) -> Iterator[Pair]:
    settings = Settings(layout=LAYOUT, pool_bytes=POOL_BYTES, integrity=integrity)
    source, target = (Node(name, settings, host="127.0.0.1", prefix=wan.command("a", [])) for name in ("near", "far"))
    with Driver(source, target) as driver:
        source.engine.fill(1)
        yield Pair(driver, source, target)


def measure(pair: Pair, *, idle_engines: bool = True) -> Rate:
    """Steady state between two deliveries. What a busy engine uses is not the transfer's."""
    pair.target.engine.clear()
    last: list[Transfer] = []
    flow = Flow(pair.driver, pair.transfer, DEPTH, on_delivery=last.append)
    nodes = (pair.source, pair.target)
    pids = [os.getpid(), *(pid for node in nodes for pid in (node.pids if idle_engines else node.pids[:1]))]
    flow.start()
    run_flows(pair.driver, [flow], lambda: flow.bytes_delivered >= _WARM_BYTES)
    began, began_cpu = flow.delivered[-1], cpu_s(pids)
    before = flow.bytes_delivered
    run_flows(pair.driver, [flow], lambda: flow.bytes_delivered - before >= _MEASURED_BYTES)
    used, ended, moved = cpu_s(pids) - began_cpu, flow.delivered[-1], flow.bytes_delivered - before
    drain(pair.driver, [flow])
    for transfer in last[-DEPTH:]:
        transfer.verify()
    return Rate(moved / 1e9 / (ended.at - began.at), used / (moved / 1e9))


def measure_beside_busy_engine(pair: Pair) -> Rate:
    """A Python loop in the engine that maps the receiving pool."""
    pair.target.engine.busy()
    try:
        return measure(pair, idle_engines=False)
    finally:
        pair.target.engine.idle()


def measure_beside_busy_stranger(pair: Pair) -> Rate:
    """The same loop in a process that has nothing to do with the transfer."""
    pool_fd = os.memfd_create("unrelated")
    os.ftruncate(pool_fd, 4096)
    stranger = Engine(pool_fd)
    stranger.busy()
    try:
        return measure(pair, idle_engines=False)
    finally:
        stranger.close()
        os.close(pool_fd)
