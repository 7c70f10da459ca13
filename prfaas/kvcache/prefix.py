"""Who holds how much of which prompts: the index over one node's cache or over the caches of a whole cluster (R4).

For each owner there are two answers (M1, M2): how far its KV reaches, without a hole, and the last boundary within that
at which it has a state as well. A state never stands without the KV under it (R21). Keys always run from the start of
the prompt, 16 bytes for each hash unit. Answers are tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.matching import Found
from prfaas.kvcache.radix import RadixTree, Run, Size, State, Step, units
from prfaas.request import Matches

#: Of one run with its dicts, of one holder's entry in it, and of one state with what it hangs on.
_RUN_BYTES, _HOLDER_BYTES, _STATE_BYTES = 700, 100, 400


class ChangeKind(Enum):
    """KV_ADDED: the owner has all the units named. KV_REMOVED: it lost the last one named and all that follows it.
    STATE_ADDED, STATE_REMOVED: about the state at the end of the units named."""

    KV_ADDED = "kv_added"
    KV_REMOVED = "kv_removed"
    STATE_ADDED = "state_added"
    STATE_REMOVED = "state_removed"


@dataclass(frozen=True, slots=True)
class Change:
    """What became of an owner's cache."""

    kind: ChangeKind
    keys: bytes


class PrefixIndex:
    def __init__(self) -> None:
        self._tree = RadixTree()

    def find(self, keys: bytes, limit_tokens: int) -> Found:
        """What there is of a prompt, one walk for all owners. A prefill can use `limit_tokens` at most."""
        return Found(self._tree.walk(keys), keys, limit_tokens)

    def match(self, keys: bytes, limit_tokens: int) -> Matches:
        """The best holders of a prompt's prefix, best first, and what each has."""
        return self.find(keys, limit_tokens).best()

    def apply(self, owner: NodeId, change: Change) -> None:
        match change.kind:
            case ChangeKind.KV_ADDED:
                self.insert(change.keys, owner)
            case ChangeKind.KV_REMOVED:
                self.remove(change.keys, owner)
            case ChangeKind.STATE_ADDED:
                self.add_state(change.keys, owner)
            case ChangeKind.STATE_REMOVED:
                self.remove_state(change.keys, owner)
            case _:
                assert_never(change.kind)

    @property
    def nbytes(self) -> int:
        """What the index takes in memory: an estimate that is rather too large."""
        size = self._tree.size
        return (
            size.runs * _RUN_BYTES + size.units * KEY_BYTES + size.holders * _HOLDER_BYTES + size.states * _STATE_BYTES
        )

    @property
    def size(self) -> Size:
        """To read."""
        return self._tree.size

    @property
    def runs_count(self) -> int:
        return self._tree.size.runs

    def insert(self, keys: bytes, owner: NodeId) -> Run:
        """The owner has the KV of all these units. Returns the run in which they end."""
        path = self._tree.grow(keys)
        for run, matched in path:
            before = run.holders.get(owner)
            self._tree.size.holders += before is None
            run.holders[owner] = max(matched, before or 0)
        return path[-1].run

    def add_state(self, keys: bytes, owner: NodeId, proven: bool = True) -> bool:
        """The owner has a state at the end of these units. False if that is known, or if the owner lacks the KV: such
        an orphan is of no use to anyone."""
        step = self.end(keys)
        if step is None or step.run.holders.get(owner, 0) < step.matched:
            return False
        owners = step.run.states.setdefault(step.matched, {})
        if owner in owners:
            return False
        owners[owner] = State(proven)
        self._tree.size.states += 1
        return True

    def remove(self, keys: bytes, owner: NodeId) -> None:
        """The owner lost the last of these units, and with it all that follows: KV, and the states on it (R21)."""
        step = self.end(keys)
        if step is not None:
            self._drop(step.run, owner, step.matched - 1)

    def remove_state(self, keys: bytes, owner: NodeId) -> None:
        step = self.end(keys)
        if step is not None:
            self._forget_state(step.run, step.matched, owner)

    def remove_owner(self, owner: NodeId) -> None:
        """The owner is gone, or has to be learned anew."""
        self._drop(self._tree.root, owner, 0)

    def below(self, keys: bytes, owner: NodeId) -> Iterator[Step]:
        """The runs in which the owner holds something past all but the last of these units, from the top, and where in
        each that begins."""
        step = self.end(keys)
        if step is None or step.run.holders.get(owner, 0) < step.matched:
            return
        runs = [step.run]
        yield Step(step.run, step.matched - 1)
        for upper in runs:
            for run in upper.children.values():
                if owner in run.holders:
                    runs.append(run)
                    yield Step(run, run.start)

    def runs(self) -> Iterator[Run]:
        return self._tree.runs()

    def check(self) -> None:
        self._tree.check()

    def end(self, keys: bytes) -> Step | None:
        """The run in which all of `keys` end, if they are in the tree."""
        path = self._tree.walk(keys)
        return path[-1] if path and path[-1].matched == units(keys) else None

    def _drop(self, run: Run, owner: NodeId, kept: int) -> None:
        """Take from an owner all it holds past `kept` in a run and below it. Runs leave the tree only after that,
        since a run that leaves may make two others one."""
        runs = [run]
        for upper in runs:
            runs.extend(child for child in upper.children.values() if owner in child.holders)
        for each in runs:
            self._shrink(each, owner, max(kept, each.start))
        for each in reversed(runs):
            self._tree.trim(each)

    def _shrink(self, run: Run, owner: NodeId, kept: int) -> None:
        if run.holders.get(owner, 0) <= kept:
            return
        for boundary in [boundary for boundary in run.states if boundary > kept]:
            self._forget_state(run, boundary, owner)
        if kept > run.start:
            run.holders[owner] = kept
        else:
            del run.holders[owner]
            self._tree.size.holders -= 1

    def _forget_state(self, run: Run, boundary: int, owner: NodeId) -> None:
        owners = run.states.get(boundary, {})
        if owners.pop(owner, None) is not None:
            self._tree.size.states -= 1
            if not owners:
                del run.states[boundary]
