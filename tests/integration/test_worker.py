"""One worker with its real engine and pump: what a token link's commands leave behind, whatever order they come in."""

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId, Role
from prfaas.config import CacheConfig
from prfaas.engine.cost_model import write_config
from prfaas.errors import (
    KV_ROOM,
    DeadlineExceeded,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.membership.store import Store
from prfaas.node.admission import Admission, Limits
from prfaas.node.children import children
from prfaas.node.engine_client import CANCEL_DEADLINE_S, EngineClient
from prfaas.node.pool_client import PoolClient
from prfaas.node.prefill_story import LINE_BYTES_PER_S, SMALL_S
from prfaas.node.pump_client import PumpClient
from prfaas.node.tenure import Place, WorkerSession
from prfaas.node.worker import Worker
from prfaas.node.workplace import PUMP_TTL_SLACK_S
from prfaas.request import NO_PERMIT, AttemptId, FinishReason, RequestId, Sampling
from prfaas.rpc.commands import (
    Cancel,
    Decode,
    Destination,
    Done,
    Event,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
)
from prfaas.transfer.outgoing import Urgency
from prfaas.transfer.pump.control import REPORT_S
from prfaas.transfer.pump.messages import Send, Start

POOL_BYTES = 8 << 20
LIMITS = Limits(max_sequences=4, max_tokens=50_000, max_prefill_tokens=50_000, max_prefills=4)
LIVENESS_S = 20.0

HERE, ELSEWHERE = NodeId("w"), NodeId("other")


class Router:
    """A router's end of a session: what was emitted, by attempt."""

    def __init__(self, worker: Worker) -> None:
        self._events: dict[AttemptId, asyncio.Queue[Event]] = {}
        self._session: WorkerSession = worker.open_session(self._take)

    def _take(self, attempt: AttemptId, event: Event) -> None:
        self._events.setdefault(attempt, asyncio.Queue()).put_nowait(event)

    def send(self, attempt: AttemptId, command: Reserve | Prefill | Decode | Cancel) -> None:
        self._session.handle(attempt, command)

    async def answer(self, attempt: AttemptId) -> Event:
        async with asyncio.timeout(LIVENESS_S):
            return await self._events.setdefault(attempt, asyncio.Queue()).get()

    async def ask(self, attempt: AttemptId, command: Reserve | Prefill | Decode) -> Event:
        self.send(attempt, command)
        return await self.answer(attempt)

    def close(self) -> None:
        self._session.close()


@asynccontextmanager
async def worker_on(
    model_dir: Path,
    name: NodeId = HERE,
    limits: Limits = LIMITS,
    *,
    region: str = "b",
    pool_bytes: int = POOL_BYTES,
    store: Store | None = None,
    cache: CacheConfig = CacheConfig(),  # noqa: B008 - frozen
    capabilities: tuple[str, ...] = (),
) -> AsyncIterator[Worker]:
    """With a `store` it uses the cache pools that are in there. `capabilities`: said of its engine besides its own."""
    async with children(model_dir, pool_bytes) as (engine_child, pump_child), asyncio.TaskGroup() as group:
        engine, pump = EngineClient(name, engine_child.channel), PumpClient(name, pump_child.channel)
        crew = [group.create_task(engine.run()), group.create_task(pump.run())]
        info, incarnation = await engine.info(), Incarnation(secrets.randbits(64))
        info = msgspec.structs.replace(info, capabilities=(*info.capabilities, *capabilities))
        start = Start(
            node=name,
            incarnation=incarnation,
            namespace=info.namespace,
            layout=info.layout,
            pool_bytes=pool_bytes,
            listen_host="127.0.0.1",
            listen_port=0,
            no_progress_s=5,
            connect_s=5,
        )
        place = Place(name, RegionId(region), incarnation, {"": f"127.0.0.1:{await pump.start(start)}"})
        pool = PoolClient(place, info.namespace, cache, None) if store is not None else None
        if pool is not None and store is not None:
            crew.append(group.create_task(pool.run(store, "default")))
        worker = Worker(place, info, engine, pump, Admission(limits), group.create_task, pool, cache)
        yield worker
        await worker.drain(0)
        for task in crew:
            task.cancel()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "cost"
    directory.mkdir()
    write_config(directory)
    return directory


@pytest.fixture
async def worker(model_dir: Path) -> AsyncIterator[Worker]:
    async with worker_on(model_dir) as worker:
        yield worker


def prompt(tokens: int) -> bytes:
    return np.arange(tokens, dtype="<u4").astype("<u4").__mod__(500).astype("<u4").tobytes()


def attempt() -> AttemptId:
    return AttemptId(secrets.token_hex(16))


def reserve(
    worker: Worker, tokens: int, source: NodeId = HERE, *, max_tokens: int = 4, deadline_s: float = 60
) -> Reserve:
    return Reserve(
        request_id=RequestId("r"),
        prompt=prompt(tokens),
        sampling=Sampling(max_tokens=max_tokens),
        source_node=source,
        source_region=RegionId("a"),
        source_namespace=worker.info.namespace,
        deadline_s=deadline_s,
    )


def prefill(tokens: int, destination: Destination | None = None, *, deadline_s: float = 60) -> Prefill:
    return Prefill(request_id=RequestId("r"), prompt=prompt(tokens), destination=destination, deadline_s=deadline_s)


async def at_rest(worker: Worker) -> None:
    """Everything was given back: attempts, admission, the pool's bytes."""
    async with asyncio.timeout(LIVENESS_S):
        while worker.attempts or worker.lingering or worker.load().kv_free_bytes != worker.load().kv_total_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (worker.admission.sequences, worker.admission.prefills, worker.admission.committed_tokens) == (0, 0, 0)
    worker.admission.check()


async def whole_answer(router: Router, one: AttemptId) -> tuple[bytes, Done]:
    tokens = b""
    while isinstance(event := await router.answer(one), Tokens):
        tokens += event.tokens
    assert isinstance(event, Done)
    return tokens, event


async def test_a_request_served_on_one_node(worker: Worker):
    """Reserve, prefill and decode in turn; the last token gives everything back."""
    router, one = Router(worker), attempt()
    assert isinstance(await router.ask(one, reserve(worker, 600)), Reserved)
    done = await router.ask(one, prefill(600))
    assert isinstance(done, PrefillDone) and (done.prefill_tokens, done.kv_bytes) == (599, 0)
    router.send(one, Decode())
    tokens, end = await whole_answer(router, one)
    assert (len(tokens), end.reason, end.recomputed_tokens, end.output_tokens) == (16, FinishReason.LENGTH, 1, 4)
    await at_rest(worker)


async def test_a_request_that_crosses_gives_the_same_tokens(worker: Worker, model_dir: Path):
    """Prefilled on another worker and pushed over TCP, the answer is the same as on one node."""
    local, far = Router(worker), attempt()
    one = attempt()
    await local.ask(one, reserve(worker, 900))
    await local.ask(one, prefill(900))
    local.send(one, Decode())
    expected, _ = await whole_answer(local, one)
    async with worker_on(model_dir, ELSEWHERE) as other:
        reserved = await local.ask(far, reserve(worker, 900, ELSEWHERE))
        assert isinstance(reserved, Reserved)
        destination = Destination(
            node=HERE,
            incarnation=reserved.incarnation,
            kv_address=reserved.kv_address,
            generation=reserved.generation,
            permit=reserved.permit,
        )
        pushed = await Router(other).ask(far, prefill(900, destination))
        assert isinstance(pushed, PrefillDone) and pushed.kv_bytes == worker.info.layout.size_bytes(899)
        await at_rest(other)
        local.send(far, Decode())
        tokens, _ = await whole_answer(local, far)
    assert tokens == expected
    await at_rest(worker)


@pytest.mark.parametrize(
    ("tokens", "allowed", "urgency"),
    [
        pytest.param(600, None, Urgency.FINISHING, id="short"),
        pytest.param(16_000, None, Urgency.NORMAL, id="long"),
        pytest.param(600, 20e6, Urgency.NORMAL, id="long on this line"),
    ],
)
async def test_field_F1_a_short_transfer_is_urgent(
    worker: Worker,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    allowed: float | None,
    urgency: Urgency,
):
    """What its line, as far as it is known, carries in about a round trip goes before the long ones."""
    async with worker_on(model_dir, ELSEWHERE) as other:
        nbytes, pump, sends = worker.info.layout.span_bytes(tokens - 1), other._pump, list[Send]()
        assert (nbytes <= SMALL_S * (allowed or LINE_BYTES_PER_S)) is (urgency is Urgency.FINISHING)
        pump.allow(RegionId("b"), allowed)
        send = pump.send
        monkeypatch.setattr(pump, "send", lambda command: (sends.append(command), send(command)))
        one = attempt()
        reserved = await Router(worker).ask(one, reserve(worker, tokens, ELSEWHERE))
        assert isinstance(reserved, Reserved)
        destination = Destination(
            node=HERE,
            incarnation=reserved.incarnation,
            kv_address=reserved.kv_address,
            generation=reserved.generation,
            region=RegionId("b"),
            permit=reserved.permit,
        )
        assert isinstance(await Router(other).ask(one, prefill(tokens, destination)), PrefillDone)
        assert [command.urgency for command in sends] == [urgency]


async def test_a_tenant_has_its_share_of_the_line(worker: Worker, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """The pump learns of each transfer whose it is and what the tenant gets against others: by that it shares the line,
    also where nothing is cached."""
    async with worker_on(model_dir, ELSEWHERE) as other:
        pump, sends = other._pump, list[Send]()
        send = pump.send
        monkeypatch.setattr(pump, "send", lambda command: (sends.append(command), send(command)))
        one = attempt()
        reserved = await Router(worker).ask(one, reserve(worker, 600, ELSEWHERE))
        assert isinstance(reserved, Reserved)
        command = replace(prefill(600, toward(reserved)), tenant="acme", weight=2.5)
        assert isinstance(await Router(other).ask(one, command), PrefillDone)
        assert [(command.tenant, command.weight) for command in sends] == [("acme", 2.5)]


async def test_a_worker_says_what_it_did_with_its_time(worker: Worker, model_dir: Path):
    """Of every command how long it had it, and of that each part as it was measured: they leave nothing out, and are no
    longer than what the router waited."""
    local, one = Router(worker), attempt()
    async with worker_on(model_dir, ELSEWHERE) as other:
        asked_s = time.monotonic()
        reserved = await local.ask(one, reserve(worker, 6000, ELSEWHERE))
        assert isinstance(reserved, Reserved) and reserved.took_s is not None
        assert 0 < reserved.took_s <= time.monotonic() - asked_s
        asked_s = time.monotonic()
        done = await Router(other).ask(one, prefill(6000, toward(reserved)))
        assert isinstance(done, PrefillDone) and done.took_s is not None
        assert done.took_s <= time.monotonic() - asked_s
        assert min(done.queue_s, done.compute_s, done.exposed_s) > 0
        assert done.queue_s + done.compute_s + done.exposed_s == pytest.approx(done.took_s, abs=1e-6)
        asked_s = time.monotonic()
        first = await local.ask(one, Decode())
        assert isinstance(first, Tokens) and first.first_took_s is not None
        assert first.first_queue_s is not None and first.first_step_s is not None
        assert first.first_took_s <= time.monotonic() - asked_s
        assert min(first.first_queue_s, first.first_step_s) > 0
        assert first.first_queue_s + first.first_step_s == pytest.approx(first.first_took_s, abs=1e-6)
        await whole_answer(local, one)
    await at_rest(worker)


def toward(reserved: Reserved) -> Destination:
    return Destination(
        node=HERE,
        incarnation=reserved.incarnation,
        kv_address=reserved.kv_address,
        generation=reserved.generation,
        region=RegionId("b"),
        permit=reserved.permit,
    )


@pytest.mark.parametrize("whose", ["nobody's", "another attempt's", "another node's"])
async def test_only_the_permit_of_the_reservation_lets_kv_in(worker: Worker, model_dir: Path, whose: str):
    """None, one of another attempt, or one that was given to another node: the transfer fails, the reservation is still
    there, and nothing was received."""
    local, far, neighbour = Router(worker), attempt(), attempt()
    source = NodeId("third") if whose == "another node's" else ELSEWHERE
    async with worker_on(model_dir, ELSEWHERE) as other:
        reserved = await local.ask(far, reserve(worker, 900, source))
        theirs = await local.ask(neighbour, reserve(worker, 900, ELSEWHERE))
        assert isinstance(reserved, Reserved) and isinstance(theirs, Reserved)
        assert len({reserved.permit.ticket, theirs.permit.ticket, b""}) == 3
        assert len({reserved.permit.key_out, reserved.permit.key_back, theirs.permit.key_out, b""}) == 4
        permits = {"nobody's": NO_PERMIT, "another attempt's": theirs.permit, "another node's": reserved.permit}
        destination = Destination(
            node=HERE,
            incarnation=reserved.incarnation,
            kv_address=reserved.kv_address,
            generation=reserved.generation,
            permit=permits[whose],
        )
        failed = await Router(other).ask(far, prefill(900, destination))
        assert isinstance(failed, Failed) and isinstance(failed.error, TransferFailed), failed
        await at_rest(other)
    assert worker.load().active_sequences == 2
    for each in (far, neighbour):
        local.send(each, Cancel())
    await at_rest(worker)


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "prefilled", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "session"])
async def test_field_A7_an_end_at_any_stage_gives_everything_back(worker: Worker, stage: str, how: str):
    """Cancelled, or its router gone, wherever the attempt is: nothing stays behind."""
    router, one = Router(worker), attempt()
    await router.ask(one, reserve(worker, 4000, max_tokens=500))
    if stage != "reserved":
        router.send(one, prefill(4000))
    if stage in ("prefilled", "decoding"):
        assert isinstance(await router.answer(one), PrefillDone)
    if stage == "decoding":
        assert isinstance(await router.ask(one, Decode()), Tokens)
    if how == "cancel":
        router.send(one, Cancel())
        router.send(one, Cancel())
    else:
        router.close()
    await at_rest(worker)


async def test_field_A1_a_reservation_ends_by_its_deadline(worker: Worker):
    """A router that never comes back costs the pool no longer than it asked for."""
    router, one = Router(worker), attempt()
    assert isinstance(await router.ask(one, reserve(worker, 500, ELSEWHERE, deadline_s=0.2)), Reserved)
    failed = await router.answer(one)
    assert isinstance(failed, Failed) and isinstance(failed.error, DeadlineExceeded)
    await at_rest(worker)


async def test_a_destination_that_does_not_answer_fails_the_prefill(worker: Worker):
    """The push fails at once and by name, and the prefill's own span is given back."""
    nobody = Destination(node=ELSEWHERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=1)
    failed = await Router(worker).ask(attempt(), prefill(3000, nobody))
    assert isinstance(failed, Failed) and isinstance(failed.error, TransferFailed)
    assert failed.error.cause == "connect"
    await at_rest(worker)


async def test_a_span_goes_back_after_the_engine_has_let_go(worker: Worker):
    """The engine may be in the middle of writing to it: an attempt that failed keeps its span until it says no more."""
    router, one = Router(worker), attempt()
    [engine] = [child for child in psutil.Process().children() if "prfaas.node.engine_process" in child.cmdline()]
    engine.suspend()
    try:
        nobody = Destination(node=ELSEWHERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=1)
        assert isinstance(await router.ask(one, prefill(3000, nobody)), Failed)
        with pytest.raises(TimeoutError):
            await until_pool_is_whole(worker, 4 * REPORT_S)
    finally:
        engine.resume()
    await at_rest(worker)


async def until_pool_is_whole(worker: Worker, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while worker.load().kv_free_bytes != worker.load().kv_total_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_pump_waits_longer_than_a_stuck_engine_is_waited_for():
    """It takes an abandoned span back by itself, and by then the node has either heard from the engine or ended it."""
    assert PUMP_TTL_SLACK_S > CANCEL_DEADLINE_S


async def test_field_G3_another_namespace_is_refused(worker: Worker):
    """KV of another model is refused before any room is taken."""
    command = reserve(worker, 500, ELSEWHERE)
    other = Reserve(
        **{name: getattr(command, name) for name in command.__slots__ if name != "source_namespace"},
        source_namespace=Namespace("another"),
    )
    failed = await Router(worker).ask(attempt(), other)
    assert isinstance(failed, Failed) and isinstance(failed.error, NamespaceMismatch)
    await at_rest(worker)


async def test_what_engines_carry_themselves_needs_no_room(model_dir: Path):
    """Where both engines have a network of their own, the decode node keeps a place in admission and nothing else."""
    async with worker_on(model_dir, capabilities=("network:x",)) as worker:
        router, one = Router(worker), attempt()
        reserved = await router.ask(one, replace(reserve(worker, 600, ELSEWHERE), network="x"))
        assert isinstance(reserved, Reserved) and reserved.permit == NO_PERMIT
        assert worker.load().kv_free_bytes == worker.load().kv_total_bytes
        assert worker.admission.sequences == 1
        router.send(one, Cancel())
        await at_rest(worker)


async def test_a_network_that_the_engine_has_not_is_refused(worker: Worker):
    """A router may know an earlier life of the node, which had it: other nodes do better."""
    router, one, other = Router(worker), attempt(), attempt()
    elsewhere = Destination(
        node=ELSEWHERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=0, network="x"
    )
    for failed in (
        await router.ask(one, replace(reserve(worker, 600, ELSEWHERE), network="x")),
        await router.ask(other, prefill(600, elsewhere)),
    ):
        assert isinstance(failed, Failed) and isinstance(failed.error, Overloaded), failed
    await at_rest(worker)


async def test_field_E4_no_room_is_said_at_once(worker: Worker):
    """Sequences, and the pool's bytes: a refusal, never a wait, and a later attempt finds the room again."""
    router, held = Router(worker), [attempt() for _ in range(LIMITS.max_sequences)]
    for one in held:
        assert isinstance(await router.ask(one, reserve(worker, 50)), Reserved)
    assert await refusal(router, reserve(worker, 50)) == "sequences"
    for one in held:
        router.send(one, Cancel())
    await at_rest(worker)
    too_much = await refusal(router, reserve(worker, 40_000, ELSEWHERE))
    assert too_much == KV_ROOM
    assert isinstance(await router.ask(attempt(), reserve(worker, 50)), Reserved)


async def test_field_E3_a_prefill_without_room_for_its_kv_computes_nothing(worker: Worker, model_dir: Path):
    """The span is taken before the engine begins: a pool that is full of KV on its way out refuses at once, and the
    engine is never further ahead of the line than the spans it has."""
    async with worker_on(
        model_dir, ELSEWHERE, replace(LIMITS, max_tokens=200_000, max_prefill_tokens=200_000)
    ) as other:
        router, blocked = Router(other), attempt()
        nobody = Destination(node=HERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=1)
        router.send(blocked, prefill(40_000, nobody))
        failed = await router.answer(blocked)
        assert isinstance(failed, Failed) and isinstance(failed.error, Overloaded)
        assert failed.error.resource == KV_ROOM
        small = attempt()
        await router.ask(small, reserve(other, 600))
        assert isinstance(await router.ask(small, prefill(600)), PrefillDone)
        router.send(small, Cancel())
        await at_rest(other)
        async with asyncio.timeout(LIVENESS_S):
            while other._engine.load.prefill_tokens_total < 599:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert other._engine.load.prefill_tokens_total == 599


async def refusal(router: Router, command: Reserve) -> str:
    failed = await router.ask(attempt(), command)
    assert isinstance(failed, Failed) and isinstance(failed.error, Overloaded)
    return failed.error.resource


async def test_a_destination_that_has_it_all_is_the_routers_fault(worker: Worker):
    """At least the rows behind the last whole block of the cache are sent, so nobody holds more than up to there."""
    there = Destination(node=ELSEWHERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=1)
    for held_tokens in (640, -64):
        failed = await Router(worker).ask(attempt(), prefill(641, replace(there, held_tokens=held_tokens)))
        assert isinstance(failed, Failed) and isinstance(failed.error, InvalidRequest)
    await at_rest(worker)


@pytest.mark.parametrize("hurry", [prefill(10), Decode()])
async def test_commands_out_of_order_are_the_routers_fault(worker: Worker, hurry: Prefill | Decode):
    """Prefill or decode of an attempt that nobody reserved is refused by name."""
    failed = await Router(worker).ask(attempt(), hurry)
    assert isinstance(failed, Failed) and isinstance(failed.error, InvalidRequest)


async def test_an_attempt_id_is_used_once(worker: Worker):
    """A second reservation under a live id is refused, and the first one is untouched."""
    router, one = Router(worker), attempt()
    await router.ask(one, reserve(worker, 100))
    failed = await router.ask(one, reserve(worker, 100))
    assert isinstance(failed, Failed) and isinstance(failed.error, PrfaasError)
    assert isinstance(await router.ask(one, prefill(100)), PrefillDone)


async def test_a_draining_worker_finishes_what_it_has(worker: Worker):
    """Nothing new is taken; the stream that runs comes to its end before the drain returns."""
    router, one = Router(worker), attempt()
    await router.ask(one, reserve(worker, 300, max_tokens=50))
    await router.ask(one, prefill(300))
    router.send(one, Decode())
    draining = asyncio.create_task(worker.drain(LIVENESS_S))
    tokens, _ = await whole_answer(router, one)
    await draining
    assert len(tokens) == 50 * 4
    assert await refusal(router, reserve(worker, 10)) == "draining"
    await at_rest(worker)


@pytest.mark.parametrize(
    ("accepts", "taken"), [(Role.DECODE, "sequence"), (Role.PREFILL, "prefill"), (Role.MIXED, "both"), (None, "none")]
)
async def test_a_role_says_what_new_work_is_taken(worker: Worker, accepts: Role | None, taken: str):
    """Whatever it does not take is refused as for want of room, so that the router finds another node."""
    router = Router(worker)
    worker.accepts = accepts
    nobody = Destination(node=ELSEWHERE, incarnation=Incarnation(1), kv_address="127.0.0.1:1", generation=1)
    sequence, push = await router.ask(attempt(), reserve(worker, 50)), await router.ask(attempt(), prefill(50, nobody))
    assert isinstance(sequence, Reserved) == (taken in ("sequence", "both"))
    assert isinstance(push, Failed)
    assert isinstance(push.error, Overloaded) == (taken not in ("prefill", "both"))


async def test_a_node_that_loses_decode_finishes_its_streams(worker: Worker):
    """What was there when the change began is waited for; what is refused meanwhile is not."""
    router, one = Router(worker), attempt()
    await router.ask(one, reserve(worker, 300, max_tokens=60))
    await router.ask(one, prefill(300))
    router.send(one, Decode())
    worker.accepts = Role.PREFILL
    assert worker.holding(prefill=True, decode=False) == frozenset()
    assert worker.holding(prefill=False, decode=True) == {one}
    ended = asyncio.create_task(worker.ended(frozenset({one}), prefill=False, decode=True))
    assert (await refusal(router, reserve(worker, 10))).startswith("role")
    tokens, _ = await whole_answer(router, one)
    async with asyncio.timeout(LIVENESS_S):
        await ended
    assert len(tokens) == 60 * 4
    await at_rest(worker)


async def test_a_node_that_loses_prefill_finishes_its_prefills(worker: Worker):
    """A prefill that is under way comes to its end, and so does the fallback of a sequence that is here already."""
    router, one, other = Router(worker), attempt(), attempt()
    await router.ask(other, reserve(worker, 200))
    await router.ask(one, reserve(worker, 4000))
    router.send(one, prefill(4000))
    worker.accepts = Role.DECODE
    assert worker.holding(prefill=True, decode=False) == {one}
    ended = asyncio.create_task(worker.ended(frozenset({one}), prefill=True, decode=False))
    assert isinstance(await router.ask(other, prefill(200)), PrefillDone)
    assert isinstance(await router.answer(one), PrefillDone)
    async with asyncio.timeout(LIVENESS_S):
        await ended
    for each in (one, other):
        router.send(each, Cancel())
    await at_rest(worker)


async def test_an_operator_may_hold_a_worker(worker: Worker):
    """It says so in its load, takes nothing new, and goes on when it is let go."""
    router = Router(worker)
    worker.hold(True)
    assert worker.load().draining
    assert await refusal(router, reserve(worker, 10)) == "draining"
    worker.hold(False)
    assert not worker.load().draining
    assert isinstance(await router.ask(attempt(), reserve(worker, 10)), Reserved)


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_a_node_that_is_going_down_says_so(model_dir: Path):
    """When engine or pump has died no task can begin: who asks is told, and what was open is let go without a fuss."""
    held, later = attempt(), attempt()
    try:
        async with asyncio.timeout(LIVENESS_S), worker_on(model_dir) as worker:
            router = Router(worker)
            assert isinstance(await router.ask(held, reserve(worker, 100, ELSEWHERE)), Reserved)
            next(one for one in psutil.Process().children() if "prfaas.transfer.pump" in one.cmdline()).kill()
            await asyncio.Event().wait()
    except* PeerUnavailable:
        pass  # as it should
    failed = await router.ask(later, reserve(worker, 100))
    assert isinstance(failed, Failed) and isinstance(failed.error, PeerUnavailable) and failed.error.peer == HERE
    router.close()
    assert worker.attempts == 0 and worker.admission.committed_tokens == 0
    gc.collect()
