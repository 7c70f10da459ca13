"""The prefix cache of one node: what it holds, how many bytes that takes, and what goes when room is short (R18).

An operation that takes something in makes room as well, so that between operations at most EVICT_ABOVE of the capacity
is taken. Each returns the `Change`s by which an index elsewhere follows.
"""

from collections.abc import Iterable, Sequence

from prfaas.cluster import NodeId
from prfaas.kvcache.eviction import Sizes, Victim, Victims
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.matching import Found
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.kvcache.radix import State, first_units, units
from prfaas.kvcache.states import Checkpoint
from prfaas.request import Match

EVICT_ABOVE = 0.90
EVICT_BATCH = 0.05


class NodeCache:
    """`state_bytes` and `bytes_per_token` are a and b of S_kv(l) = a + b*l. `handoff_tokens` are those that a prefill
    computes: all of a prompt but its last."""

    def __init__(self, owner: NodeId, capacity_bytes: int, state_bytes: int, bytes_per_token: int) -> None:
        assert state_bytes > 0, "a model without recurrent state resumes anywhere and needs no checkpoints"
        self._owner = owner
        self._full_bytes = int(EVICT_ABOVE * capacity_bytes)
        self._batch_bytes = int(EVICT_BATCH * capacity_bytes)
        self._sizes = Sizes(state_bytes, bytes_per_token * HASH_UNIT_TOKENS)
        self._index = PrefixIndex()
        self._used_bytes = 0
        #: Turns: each look-up and each admission is one.
        self._turn = 0

    def lookup(self, keys: bytes, handoff_tokens: int) -> Match:
        """What a prefill that starts now finds. The state it resumes from is proven by that."""
        found = self._index.find(keys, handoff_tokens)
        match = found.at(self._owner)
        self._touch(found, resumed_at=match.joint // HASH_UNIT_TOKENS)
        return match

    def admit(self, keys: bytes, handoff_tokens: int, kept: Iterable[Checkpoint]) -> tuple[Change, ...]:
        """Take in what a prefill leaves: the KV of all complete units, and the states it kept, shortest first."""
        keys, kept = first_units(keys, handoff_tokens // HASH_UNIT_TOKENS), tuple(kept)
        changes = []
        found = self._index.find(keys, handoff_tokens)
        missing, passed = units(keys) - found.kv_units(self._owner), self._passed(found, kept)
        if missing:
            self._index.insert(keys, self._owner)
            self._used_bytes += missing * self._sizes.unit
            changes.append(Change(ChangeKind.KV_ADDED, keys))
        for checkpoint in kept:
            prefix = first_units(keys, checkpoint.tokens // HASH_UNIT_TOKENS)
            assert units(prefix) * HASH_UNIT_TOKENS == checkpoint.tokens, (
                f"{checkpoint} is not at the end of a known unit"
            )
            if self._index.add_state(prefix, self._owner, checkpoint.proven):
                self._used_bytes += self._sizes.state
                changes.append(Change(ChangeKind.STATE_ADDED, prefix))
        found = self._index.find(keys, handoff_tokens)
        if passed is not None:
            _take_over(passed, found.path[-1].run.states[kept[-1].tokens // HASH_UNIT_TOKENS][self._owner])
        self._touch(found)
        over_bytes = self._used_bytes - self._full_bytes
        return (*changes, *(self.evict(max(over_bytes, self._batch_bytes)) if over_bytes > 0 else ()))

    def evict(self, nbytes: int) -> tuple[Change, ...]:
        """Free at least `nbytes`, or all there is."""
        victims = Victims(self._index.runs(), self._owner, self._sizes, self._turn)
        goal_bytes = max(0, self._used_bytes - nbytes)
        changes = []
        while self._used_bytes > goal_bytes and (victim := victims.pop()) is not None:
            changes.append(self._give_up(victim))
            victims.offer(victim.run, victim.run.stop)
        return tuple(changes)

    def check(self) -> None:
        self._index.check()
        runs = list(self._index.runs())
        kv_units = sum(run.stop - run.start for run in runs)
        states = [owners for run in runs for owners in run.states.values()]
        assert all(run.holders.keys() == {self._owner} for run in runs), "somebody else's KV"
        nbytes = kv_units * self._sizes.unit + len(states) * self._sizes.state
        assert self._used_bytes == nbytes, f"{nbytes} bytes are held, {self._used_bytes} accounted for"
        assert nbytes <= self._full_bytes, f"{nbytes} bytes are held, {self._full_bytes} allowed"

    def _give_up(self, victim: Victim) -> Change:
        run, boundary, kept = victim.run, victim.boundary, victim.kept
        if kept == boundary:
            change = Change(ChangeKind.STATE_REMOVED, run.path_keys(boundary))
        else:
            change = Change(ChangeKind.KV_REMOVED, run.path_keys(kept + 1))
        self._index.apply(self._owner, change)
        self._used_bytes -= victim.nbytes
        return change

    def _passed(self, found: Found, kept: Sequence[Checkpoint]) -> State | None:
        """The state at the end of a leaf, where a prompt goes on from there to another state."""
        if not found.path:
            return None
        run, matched = found.path[-1]
        if run.children or matched < run.stop or all(each.tokens <= matched * HASH_UNIT_TOKENS for each in kept):
            return None
        return run.states.get(matched, {}).get(self._owner)

    def _touch(self, found: Found, resumed_at: int = 0) -> None:
        self._turn += 1
        for run, matched in found.path:
            if matched == run.stop:
                run.used = self._turn
            for boundary, owners in run.states.items():
                if boundary <= matched:
                    owners[self._owner].used = self._turn
                if boundary == resumed_at:
                    owners[self._owner].hits += 1
                    owners[self._owner].proven = True


def _take_over(passed: State, last: State) -> None:
    """A conversation went on: the next turn resumes from its last state, as others did from the one before. Only a
    prompt that leaves there needs that one again."""
    last.hits = passed.hits
    passed.proven = False
