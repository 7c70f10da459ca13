"""The prefix cache of one node: what it holds, how many bytes that takes, and what goes when room is short (R18).

`admit` makes room as well, so that after it at most EVICT_ABOVE of the capacity is taken. Each operation returns what
changed, by which an index elsewhere follows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prfaas.cluster import NodeId
from prfaas.kvcache.eviction import Cause, Held, Sizes, Victim, Victims
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.matching import Found
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.kvcache.radix import State, first_units, units
from prfaas.kvcache.states import Checkpoint
from prfaas.request import Match

EVICT_ABOVE = 0.90
EVICT_BATCH = 0.05


@dataclass(frozen=True, slots=True)
class Gone:
    """What left the index at once: the KV of some units and the states at the ends of some, each by its unit's key.
    `cause` is None for what was taken out by name."""

    change: Change
    kv: tuple[bytes, ...]
    states: tuple[bytes, ...]
    cause: Cause | None = None


class NodeCache:
    """`sizes` are of whole objects; a model without recurrent state has no states. `handoff_tokens` are those that a
    prefill computes: all of a prompt but its last."""

    def __init__(self, owner: NodeId, capacity_bytes: int, sizes: Sizes) -> None:
        assert sizes.unit > 0, "KV of no bytes"
        self._owner = owner
        self._full_bytes = int(EVICT_ABOVE * capacity_bytes)
        self._batch_bytes = int(EVICT_BATCH * capacity_bytes)
        self._sizes = sizes
        self._index = PrefixIndex()
        self._victims = Victims(owner, sizes)
        self._used_bytes = 0
        #: Turns: each look-up and each admission is one.
        self._turn = 0

    @property
    def index(self) -> PrefixIndex:
        """To read."""
        return self._index

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def lookup(self, keys: bytes, handoff_tokens: int, resumes: bool = True) -> Match:
        """What a prefill that starts now finds. The state it resumes from is proven by that; who only wants KV proves
        none."""
        found = self._index.find(keys, handoff_tokens)
        match = found.at(self._owner)
        self._touch(found, resumed_at=match.joint // HASH_UNIT_TOKENS if resumes else 0)
        return match

    def held_units(self, keys: bytes) -> int:
        """Units of KV, without making use of them."""
        return self._index.find(keys, 0).kv_units(self._owner)

    def admit(self, keys: bytes, handoff_tokens: int, kept: Iterable[Checkpoint]) -> tuple[Change, ...]:
        """Take in what a prefill leaves: the KV of all complete units, and the states it kept, shortest first. Then
        make room."""
        changes = self.publish(first_units(keys, handoff_tokens // HASH_UNIT_TOKENS), kept)
        over_bytes = self._used_bytes - self._full_bytes
        if over_bytes > 0:
            changes += self.evict(max(over_bytes, self._batch_bytes))
            assert self._used_bytes <= self._full_bytes
        return changes

    def publish(self, keys: bytes, kept: Iterable[Checkpoint]) -> tuple[Change, ...]:
        """Take in the KV of all these units and some states on it, whatever room there is."""
        kept = tuple(kept)
        changes = []
        found = self._index.find(keys, len(keys))
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
        found = self._index.find(keys, len(keys))
        if passed is not None:
            _take_over(passed, found.path[-1].run.states[kept[-1].tokens // HASH_UNIT_TOKENS][self._owner])
        self._touch(found)
        for run, _ in found.path:
            for boundary in dict.fromkeys((*run.states, run.stop)):
                self._victims.offer(run, boundary)
        return tuple(changes)

    def evict(self, nbytes: int) -> tuple[Change, ...]:
        """Free at least `nbytes`, or all there is."""
        return tuple(gone.change for gone in self.give_up(nbytes))

    def give_up(self, nbytes: int, held: Held | None = None) -> tuple[Gone, ...]:
        """Free at least `nbytes`, or all there is that is not `held`."""
        goal_bytes = max(0, self._used_bytes - nbytes)
        gone: list[Gone] = []
        aside: list[Victim] = []
        while self._used_bytes > goal_bytes and (victim := self._victims.pop(self._turn, held, aside)) is not None:
            gone.append(self._take(victim))
            self._victims.offer(victim.run, victim.run.stop)
        for victim in aside:
            self._victims.offer(victim.run, victim.boundary)
        return tuple(gone)

    def remove(self, keys: bytes) -> Gone | None:
        """The KV of the last of these units is lost: that goes, and all that stands on it (R21). None where it is not
        there."""
        steps = list(self._index.below(keys, self._owner))
        if not steps:
            return None
        kv = tuple(run.unit_key(at) for run, start in steps for at in range(start + 1, run.stop + 1))
        states = tuple(run.unit_key(at) for run, start in steps for at in sorted(run.states) if at > start)
        gone = Gone(Change(ChangeKind.KV_REMOVED, keys), kv, states)
        self._forget(gone)
        if left := self._index.end(keys[:-KEY_BYTES]):
            self._victims.offer(*left)
        return gone

    def remove_state(self, keys: bytes) -> Gone | None:
        """The state at the end of these units is lost."""
        step = self._index.end(keys)
        if step is None or self._owner not in step.run.states.get(step.matched, {}):
            return None
        gone = Gone(Change(ChangeKind.STATE_REMOVED, keys), (), (keys[-KEY_BYTES:],))
        self._forget(gone)
        self._victims.offer(*step)
        return gone

    def check(self) -> None:
        self._index.check()
        runs = list(self._index.runs())
        kv_units = sum(run.stop - run.start for run in runs)
        states = [owners for run in runs for owners in run.states.values()]
        assert all(run.holders.keys() == {self._owner} for run in runs), "somebody else's KV"
        nbytes = kv_units * self._sizes.unit + len(states) * self._sizes.state
        assert self._used_bytes == nbytes, f"{nbytes} bytes are held, {self._used_bytes} accounted for"
        for run in runs:
            for boundary in (*run.states, *(() if run.children else (run.stop,))):
                assert run.unit_key(boundary) in self._victims, f"what ends at {boundary} could never go"

    def _take(self, victim: Victim) -> Gone:
        run, boundary, kept = victim.run, victim.boundary, victim.kept
        state = (run.unit_key(boundary),) if boundary in run.states else ()
        if kept == boundary:
            gone = Gone(Change(ChangeKind.STATE_REMOVED, run.path_keys(boundary)), (), state, victim.cause)
        else:
            kv = tuple(run.unit_key(at) for at in range(kept + 1, boundary + 1))
            gone = Gone(Change(ChangeKind.KV_REMOVED, run.path_keys(kept + 1)), kv, state, victim.cause)
        self._forget(gone)
        return gone

    def _forget(self, gone: Gone) -> None:
        self._index.apply(self._owner, gone.change)
        self._used_bytes -= len(gone.kv) * self._sizes.unit + len(gone.states) * self._sizes.state

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
