"""What one walk through the prefix index found for a prompt: each owner's joint and KV match, and the best owners."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain, zip_longest

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.radix import State, Step
from prfaas.kvcache.states import usable_prefix
from prfaas.request import Match, Matches

#: A decision weighs this many holders of a prefix.
BEST_HOLDERS = 16


class Found:
    """Good until the index changes. `limit_tokens` is as far as a match is of use: what a prefill has to compute."""

    def __init__(self, path: list[Step], keys: bytes, limit_tokens: int) -> None:
        self.path = path
        self._limit_tokens = limit_tokens
        #: Where among equals to begin, so that prompts with a common start do not all name the same of its holders.
        self._turn = int.from_bytes(keys[-8:], "little")

    def kv_units(self, owner: NodeId) -> int:
        for run, matched in reversed(self.path):
            if (stop := run.holders.get(owner)) is not None:
                return min(stop, matched)
        return 0

    def at(self, owner: NodeId) -> Match:
        kv_tokens = min(self.kv_units(owner) * HASH_UNIT_TOKENS, self._limit_tokens)
        boundaries = [boundary * HASH_UNIT_TOKENS for boundary, owners in self._states if owner in owners]
        return Match(joint=usable_prefix(kv_tokens, boundaries), kv=kv_tokens)

    def best(self) -> Matches:
        """The best holders, best first, by joint match and by KV match in turn: the first counts where a prefill is to
        resume, the second where KV is to arrive."""
        best: dict[NodeId, Match] = {}
        for owner in chain.from_iterable(zip_longest(self._by_joint(), self._by_kv())):
            if len(best) == BEST_HOLDERS:
                break
            if owner is not None and owner not in best:
                best[owner] = self.at(owner)
        return best

    @cached_property
    def _states(self) -> list[tuple[int, dict[NodeId, State]]]:
        """All states on the way, the shortest first."""
        return [
            (boundary, run.states[boundary])
            for run, matched in self.path
            for boundary in sorted(run.states)
            if boundary <= matched
        ]

    def _by_joint(self) -> Iterator[NodeId]:
        """Each owner once, those that can resume farthest first."""
        seen: set[NodeId] = set()
        for boundary, owners in reversed(self._states):
            if boundary * HASH_UNIT_TOKENS <= self._limit_tokens:
                new = [owner for owner in owners if owner not in seen]
                yield from self._rotated(new)
                seen.update(new)

    def _by_kv(self) -> Iterator[NodeId]:
        """Each owner once, those whose KV reaches farthest first."""
        below: dict[NodeId, int] = {}
        for run, matched in reversed(self.path):
            # Whoever holds of a run holds of those above it too: where there are no more holders, there are no others.
            if len(run.holders) == len(below):
                continue
            new = [owner for owner in run.holders if owner not in below]
            yield from self._rotated([owner for owner in new if run.holders[owner] >= matched])
            partial = [owner for owner in new if run.holders[owner] < matched]
            yield from sorted(partial, key=run.holders.__getitem__, reverse=True)
            below = run.holders

    def _rotated(self, equal: list[NodeId]) -> list[NodeId]:
        start = self._turn % len(equal) if equal else 0
        return equal[start:] + equal[:start]
