"""Whatever happens around a shard, in whatever order: its books balance, nobody reads another's bytes, and what is over
leaves nothing behind."""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.kvcache.blocks import BlockClass, BlockState
from prfaas.kvcache.objects import Granted, Kind
from prfaas.kvcache.prefix import Change, PrefixIndex
from prfaas.kvcache.shard import ShardSpec
from tests.unit.kvcache.prompts import tokens
from tests.unit.kvcache.shards import SHARD, UNIT, World, keys_of, object_at, spec

words = st.text("ab", min_size=1, max_size=8)
tenants = st.sampled_from(["tom", "ann"])
picks = st.integers(0, 1000)


class ShardMachine(RuleBasedStateMachine):
    SPEC: ShardSpec = spec(blocks=60, quota_bytes=45 * 64)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.SPEC)
        self.count = 0
        self.leases: dict[str, tuple[int, bool]] = {}
        self.known: list[tuple[str, str]] = []
        self.snapshot: Iterator[tuple[Change, ...]] | None = None
        self.copy, self.told = PrefixIndex(), 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    @rule(
        tenant=tenants,
        word=words,
        states=st.sets(st.integers(1, 8), max_size=3),
        unproven=st.booleans(),
        ttl_s=st.sampled_from([5.0, 50.0]),
        checksum=st.sampled_from([None, 1, 2]),
    )
    def put(self, tenant: str, word: str, states: set[int], unproven: bool, ttl_s: float, checksum: int | None) -> None:
        path = keys_of(tenant, word)
        checksums = {object_at(path, at, kind): checksum for at in range(1, len(word) + 1) for kind in Kind}
        some = sorted(states)
        given = {key: value for key, value in checksums.items() if value is not None}
        holder = f"w{self.count % 2}"
        answer = self.world.put(self.name("p"), tenant, word, some, some if unproven else (), given, ttl_s, holder)
        if isinstance(answer, Granted):
            assert answer.first_tokens <= answer.stop_tokens <= tokens(len(word))
            assert all(answer.first_tokens <= at <= answer.stop_tokens for at in answer.states)

    @rule(tenant=tenants, word=words, states=st.sets(st.integers(1, 8), max_size=2))
    def store(self, tenant: str, word: str, states: set[int]) -> None:
        """A put with nothing amiss, so that there is something to find."""
        put = self.name("p")
        if isinstance(answer := self.world.put(put, tenant, word, [*states, len(word)]), Granted) and answer:
            self.world.received(put)
            self.world.released(put)
        self.known.append((tenant, word))

    @precondition(lambda self: self.world.granted)
    @rule(pick=picks, what=st.sampled_from(["received", "received", "lost", "released"]))
    def pump(self, pick: int, what: str) -> None:
        put = sorted(self.world.granted)[pick % len(self.world.granted)]
        getattr(self.world, what)(put)
        if what == "released":
            assert put in self.world.published or put in self.world.discarded or put in self.sealed()

    def sealed(self) -> set[str]:
        return {put for put, opened in self.world.shard._writing._puts.items() if opened.phase.value == "sealed"}

    @precondition(lambda self: self.known)
    @rule(pick=picks, more=st.text("ab", max_size=2), short=st.integers(0, 70), joint=st.booleans())
    def lease(self, pick: int, more: str, short: int, joint: bool) -> None:
        """What is found is what the events say, and no more than is of use."""
        tenant, word = self.known[pick % len(self.known)]
        word, ttl_s = word + more, 5.0 + pick % 50
        limit = max(0, tokens(len(word)) - short)
        expected = self.world.follower.find(keys_of(tenant, word), limit).at(SHARD)
        lease = self.name("l")
        found = self.world.lease(lease, tenant, word, limit, joint, ttl_s)
        resume = joint and self.SPEC.state_bytes > 0
        assert found.matched_tokens == expected.kv // 64 * 64
        assert found.kv_tokens == (expected.joint if resume else found.matched_tokens)
        if found:
            self.leases[lease] = (found.kv_tokens, joint)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, skip=st.integers(0, 8), short=st.integers(0, 3))
    def get(self, pick: int, skip: int, short: int) -> None:
        lease = sorted(self.leases)[pick % len(self.leases)]
        kv_tokens, joint = self.leases[lease]
        stop = max(0, kv_tokens - tokens(short))
        self.world.get(self.name("g"), lease, min(stop, tokens(skip)), stop, joint and stop == kv_tokens)

    @precondition(lambda self: self.world.served)
    @rule(pick=picks)
    def got(self, pick: int) -> None:
        self.world.got(sorted(self.world.served)[pick % len(self.world.served)])

    @precondition(lambda self: self.leases)
    @rule(pick=picks, renew=st.booleans())
    def end_or_renew(self, pick: int, renew: bool) -> None:
        lease = sorted(self.leases)[pick % len(self.leases)]
        if renew:
            self.world.shard.renew(lease, self.world.now, 5.0)  # type: ignore[arg-type]
        else:
            del self.leases[lease]
            self.world.release(lease)
            assert not self.world.release(lease)

    @precondition(lambda self: self.world.orders)
    @rule(ok=st.sampled_from([True, True, True, False]))
    def below(self, ok: bool) -> None:
        self.world.below_does(ok)

    @precondition(lambda self: self.world.orders)
    @rule()
    def below_all(self) -> None:
        self.world.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def watch(self) -> None:
        """A copy begins with a snapshot, and follows from there while that still comes."""
        self.snapshot, self.copy = self.world.shard.snapshot(100), PrefixIndex()
        self.told = len(self.world.changes)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def piece(self) -> None:
        assert self.snapshot is not None
        for change in next(self.snapshot, ()):
            self.copy.apply(SHARD, change)

    @precondition(lambda self: self.SPEC.lower_bytes is not None)
    @rule()
    def kill(self) -> None:
        self.world.restart()
        self.leases, self.snapshot = {}, None

    @invariant()
    def sound(self) -> None:
        self.world.check()
        for change in self.world.changes[self.told :]:
            self.copy.apply(SHARD, change)
        self.told = len(self.world.changes)
        pool = self.world.shard.stock.memory.pool
        by_state = sum(pool.used_bytes(BlockClass.PREFIX, state) for state in BlockState)
        assert pool.free_bytes + by_state == pool.total_bytes

    def teardown(self) -> None:
        """When all is over, nothing is left but what is published."""
        world = self.world
        if self.snapshot is not None:
            for piece in self.snapshot:
                for change in piece:
                    self.copy.apply(SHARD, change)
            self.copy.check()
            for run in world.follower.runs():
                found = self.copy.find(run.path_keys(run.stop), 0)
                assert found.kv_units(SHARD) == run.stop
                assert all(at in found.path[-1].run.states for at in run.states)
            assert self.copy.nbytes == world.follower.nbytes
        world.tick(1000.0)
        for get in list(world.served):
            world.got(get)
        for put in list(world.granted):
            world.released(put)
        world.settle()
        world.check()
        shard = world.shard
        pool = shard.stock.memory.pool
        assert not (shard.leases or shard.gets or shard.puts or shard.stock.in_operation or shard.stock.incoming_bytes)
        assert pool.free_bytes + pool.used_bytes(BlockClass.PREFIX, BlockState.PUBLISHED) == pool.total_bytes
        assert len(shard._pins) == 0
        if self.SPEC.lower_bytes is not None:
            assert len(world.below) * UNIT <= 10 * self.SPEC.lower_bytes


class TieredMachine(ShardMachine):
    SPEC = spec(blocks=30, lower_bytes=4000, quota_bytes=25 * 64)


class DenseMachine(ShardMachine):
    SPEC = spec(blocks=20, lower_bytes=2000, state_bytes=0)


TestShardMachine = ShardMachine.TestCase
TestTieredMachine = TieredMachine.TestCase
TestDenseMachine = DenseMachine.TestCase
for case in (TestShardMachine, TestTieredMachine, TestDenseMachine):
    case.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
del case
