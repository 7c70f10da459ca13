"""What stands behind our router in the benchmark: a store, workers that answer without a model, a shard of the cache.

    python -m bench.router.engine STORE_PORT MODEL_FOLDER [--layout plain|pd] [--pace steps|streams] [--no-cache]

The store, the link, the registrations and the index feed are the real ones; only the engine is made up. Its tokens are
plain words, one for each position, from a beginning that follows from the prompt: what is lost, doubled, out of order
or another stream's shows in the text. A request's `seed` is the time between its tokens in microseconds, as with the
mock worker of the other routers; without one the answer comes at once, in one piece. SIGUSR1 stops all tokens but the
first ones, SIGUSR2 lets them go on.
"""

import argparse
import asyncio
import random
import signal
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.router.model import NAME, plain_words
from bench.router.pacing import Pacer, Steps, Streams
from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, Pool, RegionId, Role, WireRange
from prfaas.config import StoreConfig
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.membership.memory import MemoryStore
from prfaas.membership.records import Measured
from prfaas.membership.registration import Registration
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.node.link_server import Emit, serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.node.pool_feed import Feed
from prfaas.process import die_with_parent
from prfaas.request import AttemptId, FinishReason
from prfaas.rpc.cache_translate import unpack_watch
from prfaas.rpc.cache_updates import pack_update
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Done,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1 import cache_pb2_grpc
from prfaas.stores import open_store
from prfaas.tokenizer.text import load_tokenizer, pack

CLUSTER, REGION, NAMESPACE = "default", RegionId("b"), Namespace("mock")
CONTEXT_TOKENS = 1 << 20
#: Longer is no pace but somebody's seed.
MAX_PACE_US = 1_000_000
#: What the shard holds: so many conversations of as many blocks.
CONVERSATIONS, BLOCKS = 2000, min(64, PROMPT_UNITS)
ROLES = {"plain": [Role.MIXED] * 4, "pd": [Role.PREFILL] * 2 + [Role.DECODE] * 2}


@dataclass(slots=True)
class Sequence:
    """An attempt that decodes. Its tokens are handed out one by one, or all at once."""

    attempt: AttemptId
    emit: Emit
    tokens: list[bytes]
    pace_us: int
    given: int = 0
    over: bool = False

    def step(self) -> bool:
        """The next token; False when it was the last."""
        if self.over:
            return False
        self.emit(self.attempt, Tokens(tokens=self.tokens[self.given]))
        self.given += 1
        return self._go_on()

    def all(self) -> None:
        self.emit(self.attempt, Tokens(tokens=b"".join(self.tokens)))
        self.given = len(self.tokens)
        self._go_on()

    def _go_on(self) -> bool:
        if self.given < len(self.tokens):
            return True
        self.over = True
        self.emit(self.attempt, Done(reason=FinishReason.LENGTH, recomputed_tokens=1, output_tokens=self.given))
        return False


@dataclass(slots=True)
class Session:
    """What one router holds on one worker."""

    worker: "MockWorker"
    emit: Emit
    reserved: dict[AttemptId, Reserve] = field(default_factory=dict)
    decoding: dict[AttemptId, Sequence] = field(default_factory=dict)

    def handle(self, attempt: AttemptId, command: Command) -> None:
        match command:
            case Reserve():
                self.reserved[attempt] = command
                self.emit(attempt, Reserved(kv_address="127.0.0.1:1", generation=1, incarnation=self.worker.life))
            case Prefill():
                self.emit(attempt, _prefilled(command))
            case Decode():
                self._decode(attempt)
            case Cancel():
                self.reserved.pop(attempt, None)
                if (sequence := self.decoding.pop(attempt, None)) is not None:
                    sequence.over = True

    def close(self) -> None:
        for sequence in self.decoding.values():
            sequence.over = True
        self.reserved.clear()
        self.decoding.clear()

    def _decode(self, attempt: AttemptId) -> None:
        reserve = self.reserved.pop(attempt)
        sampling = reserve.sampling
        paced = sampling.seed if sampling.seed <= MAX_PACE_US else 0
        sequence = Sequence(attempt, self.emit, self.worker.answer(reserve.prompt, sampling.max_tokens), paced)
        if not paced:
            sequence.all()
        elif sequence.step():
            self.decoding[attempt] = sequence
            self.worker.pacer.add(sequence)


class MockWorker:
    """Implements `link_server.Runtime`."""

    def __init__(self, node: Node, words: list[bytes], pacer: Pacer) -> None:
        self.node, self.life, self.pacer = node, node.incarnation, pacer
        self._words = words
        self._sessions: list[Session] = []

    def describe(self) -> WorkerDescription:
        return WorkerDescription(node=self.node.id, incarnation=self.life, namespace=NAMESPACE, wire=WireRange(1, 1))

    def open_session(self, emit: Emit) -> Session:
        return Session(self, emit)

    def answer(self, prompt: bytes, count: int) -> list[bytes]:
        words, first = self._words, first_word(prompt, len(self._words))
        return [words[(first + at) % len(words)] for at in range(count)]

    def measure(self) -> Measured:
        return Measured(NodeLoad(kv_free_bytes=1 << 40, kv_total_bytes=1 << 40, max_batch=4096))


def first_word(prompt: bytes, words: int) -> int:
    """Which word an answer begins with. Of a long prompt its beginning and end have to do: a mock must be cheap."""
    return zlib.crc32(prompt[:4096] + prompt[-4096:]) % words


def _prefilled(command: Prefill) -> PrefillDone:
    tokens = len(command.prompt) // 4 - 1
    return PrefillDone(queue_s=0.0, compute_s=0.0, exposed_s=0.0, prefill_tokens=tokens, kv_bytes=0)


class Shard(cache_pb2_grpc.CachePoolServicer):
    """A shard as far as its index goes, which is all that a router sees of one."""

    def __init__(self, life: Incarnation) -> None:
        rng = random.Random(1)
        held = [Change(ChangeKind.KV_ADDED, rng.randbytes(BLOCKS * KEY_BYTES)) for _ in range(CONVERSATIONS)]
        self.feed = Feed(life, NAMESPACE, lambda _bytes: iter([(change,) for change in held]))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Update]:  # noqa: N802
        async for update in self.feed.watch(unpack_watch(request)):
            yield pack_update(update)


async def serve(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.model)
    words = [pack([token_id]) for token_id in plain_words(tokenizer)]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        server = EmbeddedStoreServer(MemoryStore(), "127.0.0.1", options.store)
        await server.start()
        stack.push_async_callback(server.stop)
        store = open_store(StoreConfig(endpoints=(server.endpoint,)))
        stack.push_async_callback(store.close)
        pacers: list[Pacer] = []
        for number, role in enumerate(ROLES[options.layout]):
            pacer: Pacer = Steps() if options.pace == "steps" else Streams()
            pacers.append(pacer)
            life = Incarnation(random.getrandbits(63))
            worker = MockWorker(_node(number, role, life, tokenizer.digest), words, pacer)
            rpc = await serve_worker(worker, "127.0.0.1", options.store + 1 + number)
            stack.push_async_callback(rpc.stop, 0.0)
            await rpc.set_serving(True)
            links = await serve_link(worker, "127.0.0.1", 0)
            stack.push_async_callback(links.stop, 0.0)
            worker.node = _node(number, role, life, tokenizer.digest, rpc.port, links.port)
            group.create_task(Registration(store, CLUSTER, worker.node, worker.measure).run(), name=worker.node.id)
        if options.cache:
            pool, cache = await _shard(options.store + 1 + len(pacers), stack)
            group.create_task(Registration(store, CLUSTER, pool).run(), name=pool.id)
            stack.callback(cache.feed.close)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, _stop, pacers)
        loop.add_signal_handler(signal.SIGUSR2, _go_on, pacers)
        await asyncio.Event().wait()


def _stop(pacers: list[Pacer]) -> None:
    for pacer in pacers:
        pacer.stop()


def _go_on(pacers: list[Pacer]) -> None:
    for pacer in pacers:
        pacer.go_on()


def _node(number: int, role: Role, life: Incarnation, digest: str, port: int = 0, link_port: int = 0) -> Node:
    return Node(
        id=NodeId(f"{role.value}-{number}"),
        region=REGION,
        kind=NodeKind.PD,
        role=role,
        incarnation=life,
        namespace=NAMESPACE,
        model=NAME,
        rpc_address=f"127.0.0.1:{port}",
        link_address=f"127.0.0.1:{link_port}",
        kv_addresses={"": "127.0.0.1:1"},
        max_context_tokens=CONTEXT_TOKENS,
        tokenizer=digest,
    )


async def _shard(port: int, stack: AsyncExitStack) -> tuple[Pool, Shard]:
    life = Incarnation(random.getrandbits(63))
    shard, server = Shard(life), grpc.aio.server()  # type: ignore[abstract]
    cache_pb2_grpc.add_CachePoolServicer_to_server(shard, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stack.push_async_callback(server.stop, None)
    address = f"127.0.0.1:{bound}"
    return Pool(id=NodeId("shard-0"), region=REGION, incarnation=life, namespace=NAMESPACE, rpc_address=address), shard


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.router.engine", description=__doc__.splitlines()[0])
    parser.add_argument("store", type=int, help="port of the store; the workers' come after it")
    parser.add_argument("model", type=Path)
    parser.add_argument("--layout", choices=ROLES, default="plain")
    parser.add_argument("--pace", choices=("steps", "streams"), default="steps")
    parser.add_argument("--no-cache", dest="cache", action="store_false")
    die_with_parent(signal.SIGTERM)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
