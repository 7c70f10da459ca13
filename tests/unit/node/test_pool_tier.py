"""The orders of a shard to the tier below it: each is answered once, in order for each key, whatever the store does."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.blockstore.disk import DiskBlockStore
from prfaas.blockstore.memory import MemoryBlockStore
from prfaas.blockstore.port import BlockStore, StoreFailed
from prfaas.config import PoolConfig
from prfaas.errors import ConfigError
from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec, Window
from prfaas.kvcache.objects import Drop, Kind, Load, ObjectKey, OpId, Spill
from prfaas.node import pool_tier
from prfaas.node.pool_store import open_tier
from prfaas.node.pool_tier import Tier

#: Its window of 64 rows is 64 * 10 + 64 * 3 bytes, neither of which ends where the padding does; the state's is one of
#: 20 bytes.
LAYOUT = KvLayout(
    (
        (TensorSpec("a", TensorKind.TOKENS, "uint8", (10,)), TensorSpec("b", TensorKind.TOKENS, "uint8", (3,))),
        (TensorSpec("s", TensorKind.STATE, "uint8", (20,)),),
    )
)
UNIT = bytes(range(16))
KV, STATE = ObjectKey(Kind.KV, UNIT), ObjectKey(Kind.STATE, UNIT)
LIVENESS_S = 10.0


class Rig:
    def __init__(self, tier_of: "Callable[[Rig], Tier]") -> None:
        self.memory = bytearray(os.urandom(8192))
        self.answers: list[tuple[int, bool]] = []
        self.took: list[float] = []
        self._answered = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.tier = tier_of(self)

    def answer(self, order: Load | Spill, ok: bool) -> None:
        self.answers.append((order.op, ok))
        self._answered.set()

    async def until_answered(self, count: int) -> None:
        async with asyncio.timeout(LIVENESS_S):
            while len(self.answers) < count:
                self._answered.clear()
                await self._answered.wait()


@asynccontextmanager
async def rig(store: BlockStore) -> AsyncIterator[Rig]:
    async with asyncio.TaskGroup() as group:
        yield Rig(
            lambda made: Tier(store, LAYOUT, memoryview(made.memory), made.answer, group.create_task, made.took.append)
        )


def kv(offset: int) -> Window:
    return Window(0, 64, offset)


def tensors(memory: bytearray, offset: int) -> bytes:
    return bytes(memory[offset : offset + 640] + memory[offset + 640 : offset + 640 + 192])


async def test_what_is_written_through_comes_back_elsewhere():
    """Without what lies between the tensors, which is not part of the object."""
    async with rig(MemoryBlockStore(1 << 20)) as one:
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        one.tier.submit(Spill(OpId(2), STATE, UNIT, Window(64, 64, 1024, True)))
        await one.until_answered(2)
        kept = tensors(one.memory, 0)
        one.tier.submit(Load(OpId(3), KV, kv(2048)))
        one.tier.submit(Load(OpId(4), STATE, Window(64, 64, 4096, True)))
        await one.until_answered(4)
        assert sorted(one.answers) == [(1, True), (2, True), (3, True), (4, True)]
        assert tensors(one.memory, 2048) == kept
        assert one.memory[4096:4116] == one.memory[1024:1044]
        assert {each.key for each in await one.tier.recovered()} == {KV, STATE}


async def test_the_same_object_is_the_same_bytes_wherever_it_lay():
    """What lies between its tensors differs from place to place; a second writing of it is no other content."""
    async with rig(MemoryBlockStore(1 << 20)) as one:
        one.memory[2048 : 2048 + 832] = one.memory[:832]
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        one.tier.submit(Spill(OpId(2), KV, UNIT, kv(2048)))
        await one.until_answered(2)
    assert one.answers == [(1, True), (2, True)]


async def test_orders_of_one_key_are_carried_out_in_their_order():
    async with rig(MemoryBlockStore(1 << 20)) as one:
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        one.tier.submit(Drop(KV))
        one.tier.submit(Load(OpId(2), KV, kv(2048)))
        one.tier.submit(Spill(OpId(3), KV, UNIT, kv(1024)))
        one.tier.submit(Load(OpId(4), KV, kv(2048)))
        await one.until_answered(4)
    assert one.answers == [(1, True), (2, False), (3, True), (4, True)]
    assert tensors(one.memory, 2048) == tensors(one.memory, 1024)


async def test_a_full_store_keeps_the_object_in_memory_alone():
    async with rig(MemoryBlockStore(100)) as one:
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        await one.until_answered(1)
    assert one.answers == [(1, False)] and one.tier.writes == {"full": 1}
    assert one.tier.waiting == 0 and one.tier.idle.is_set()


async def test_R14_other_content_under_a_key_leaves_the_old_one():
    """That is no failure of the store, and is counted apart."""
    async with rig(MemoryBlockStore(1 << 20)) as one:
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        one.tier.submit(Spill(OpId(2), KV, UNIT, kv(1024)))
        one.tier.submit(Load(OpId(3), KV, kv(2048)))
        await one.until_answered(3)
    assert one.answers == [(1, True), (2, False), (3, True)]
    assert tensors(one.memory, 2048) == tensors(one.memory, 0)
    assert one.tier.writes == {"written": 1, "conflict": 1} and one.tier.conflicts == 1


async def test_what_was_found_damaged_is_counted(tmp_path: Path):
    """Whether that showed when the shard looked at what it still had, or at a read."""
    units = [bytes([number]) * 16 for number in range(3)]
    async with aclosing_store(await DiskBlockStore.open(tmp_path, "ns", 1 << 20)) as store, rig(store) as one:
        for number, unit in enumerate(units):
            one.tier.submit(Spill(OpId(number), ObjectKey(Kind.KV, unit), unit, kv(0)))
        await one.until_answered(3)
    flip(tmp_path, (0, -1))
    async with aclosing_store(await DiskBlockStore.open(tmp_path, "ns", 1 << 20)) as store, rig(store) as one:
        assert len(await one.tier.recovered()) == 2 and one.tier.damaged == 1
        for number, unit in enumerate(units):
            one.tier.submit(Load(OpId(number), ObjectKey(Kind.KV, unit), kv(1024 * number)))
        await one.until_answered(3)
        assert sum(ok for _, ok in one.answers) == 1
        assert one.tier.damaged == 2
        assert one.tier.reads == {"read": 1, "missing": 1, "damaged": 1}


def flip(root: Path, places: tuple[int, ...]) -> None:
    """A byte of the first files: of the head, or of the data."""
    for path, at in zip(sorted(root.glob(f"??/{'?' * 34}")), places, strict=False):
        whole = bytearray(path.read_bytes())
        whole[at] ^= 1
        path.write_bytes(whole)


@asynccontextmanager
async def aclosing_store(store: DiskBlockStore) -> AsyncIterator[DiskBlockStore]:
    try:
        yield store
    finally:
        await store.close()


async def test_what_cannot_be_listed_is_as_if_it_were_not_there(tmp_path: Path):
    """A folder that has gone ends the listing, not the shard: what had been found by then is taken up."""
    async with aclosing_store(await DiskBlockStore.open(tmp_path, "ns", 1 << 20)) as store, rig(store) as one:
        for number in range(64):
            unit = bytes([number]) * 16
            one.tier.submit(Spill(OpId(number), ObjectKey(Kind.KV, unit), unit, kv(0)))
        await one.until_answered(64)
        whole = len(await one.tier.recovered())
        shutil.rmtree(tmp_path / "80")
        assert whole == 64 and 0 < len(await one.tier.recovered()) < 64
        shutil.rmtree(tmp_path / "00")
        assert await one.tier.recovered() == []


class Failing(MemoryBlockStore):
    """A store that has gone away."""

    async def put(self, key: bytes, header: bytes, data: memoryview) -> None:
        raise StoreFailed("it", "put", "is gone")

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        raise StoreFailed("it", "get", "is gone")

    async def delete(self, key: bytes) -> None:
        raise StoreFailed("it", "delete", "is gone")


async def test_a_store_that_fails_costs_its_objects_and_nothing_else():
    async with rig(Failing(1 << 20)) as one:
        one.tier.submit(Spill(OpId(1), KV, UNIT, kv(0)))
        one.tier.submit(Load(OpId(2), STATE, Window(64, 64, 1024, True)))
        one.tier.submit(Drop(KV))
        await one.until_answered(2)
    assert sorted(one.answers) == [(1, False), (2, False)]


@pytest.mark.parametrize("nbytes", [20, 64, 831, 833])
async def test_field_H4_an_object_of_another_size_is_not_read(tmp_path: Path, nbytes: int):
    """Whoever wrote it: a part of it, or more, is not what was asked for, and memory stays as it was."""
    async with aclosing_store(await DiskBlockStore.open(tmp_path, "ns", 1 << 20)) as store, rig(store) as one:
        await store.put(b"k" + UNIT, UNIT, memoryview(bytes(nbytes)))
        before = bytes(one.memory)
        one.tier.submit(Load(OpId(1), KV, kv(1024)))
        await one.until_answered(1)
    assert one.answers == [(1, False)] and bytes(one.memory) == before


class Hanging(Failing):
    """A store that takes its time to fail."""

    asked = 0

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        self.asked += 1
        await asyncio.sleep(2 * pool_tier.HANGS_S)
        return await super().get(key, into)


async def test_a_store_that_hangs_is_left_alone_for_a_while(monkeypatch):
    """Who has waited for it has; those who come next do not, until it is asked again."""
    monkeypatch.setattr(pool_tier, "HANGS_S", 0.05)
    store = Hanging(1 << 20)
    keys = [ObjectKey(Kind.KV, bytes([number]) * 16) for number in range(40)]
    async with rig(store) as one:
        for number, key in enumerate(keys):
            one.tier.submit(Load(OpId(number), key, kv(0)))
        await one.until_answered(40)
        assert store.asked == pool_tier.READS
        one.tier.submit(Spill(OpId(40), KV, UNIT, kv(0)))
        one.tier.submit(Drop(KV))
        await one.until_answered(41)
        assert not any(ok for _, ok in one.answers)
        monkeypatch.setattr(one.tier, "_rests_until", 0.0)
        one.tier.submit(Load(OpId(41), KV, kv(0)))
        await one.until_answered(42)
    assert store.asked == pool_tier.READS + 1


async def test_too_many_writings_are_given_up_at_once(monkeypatch):
    """What waits is bounded."""
    monkeypatch.setattr(pool_tier, "MAX_WAITING", 3)
    async with rig(MemoryBlockStore(1 << 20)) as one:
        keys = [ObjectKey(Kind.KV, bytes([number]) * 16) for number in range(8)]
        for number, key in enumerate(keys):
            one.tier.submit(Spill(OpId(number), key, key.unit, kv(0)))
        await one.until_answered(8)
    assert one.tier.writes["dropped"] >= 4 and one.tier.writes["written"] >= 1
    assert one.tier.waiting == 0


async def test_a_folder_of_another_model_is_named_with_the_setting(tmp_path: Path):
    """Started for a new model on the old one's folder, a shard ends and says so; the folder keeps what it has."""
    own = PoolConfig(store="disk", disk_dir=str(tmp_path))
    store = await open_tier(own, "old", 1000)
    assert store is not None
    await store.close()
    with pytest.raises(ConfigError, match=r"pool\.disk_dir.*old.*new"):
        await open_tier(own, "new", 1000)
