"""How a prefill runs that goes on from a cached prefix, and what of a sequence is put into the cache. Pure.

Lengths are tokens from the start of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Extent
from prfaas.kvcache.placement import transfers
from prfaas.kvcache.states import EVERY_TOKENS, Checkpoint, checkpoints, chunk_ends
from prfaas.request import Match


def whole_units(tokens: int) -> int:
    """What of so many tokens can be in the cache at all (R13)."""
    return tokens // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS


def handoff(held_tokens: int, stop: int) -> Extent:
    """What crosses to a node that has the KV of the first `held_tokens`: the missing rows and the states at the end."""
    return Extent(held_tokens, stop, (stop,) if stop else ())


def holdable(handoff_tokens: int) -> int:
    """How much of a prompt's KV a node may have that receives the rest: at least one row is sent."""
    return whole_units(max(0, handoff_tokens - 1))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the chunks of a prefill end, and which states it keeps for the cache (R6, R8)."""

    ends: tuple[int, ...]
    kept: tuple[Checkpoint, ...] = ()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(checkpoint.tokens for checkpoint in self.kept)


def schedule(
    handoff_tokens: int,
    match: Match,
    chunk_tokens: int,
    *,
    keeps_states: bool,
    new_to_us: bool = False,
    every_tokens: int = EVERY_TOKENS,
) -> Schedule:
    """For a prefill that resumes at `match.joint`, where its prompt leaves an older one at `match.kv`. The own region's
    cache lacks even the states that it resumes from where these are `new_to_us` (R5)."""
    kept = checkpoints(handoff_tokens, match, every_tokens) if keeps_states else ()
    ends = chunk_ends(handoff_tokens, match, kept, chunk_tokens)
    resumed = (Checkpoint(match.joint, proven=True),) if keeps_states and new_to_us else ()
    return Schedule(ends, (*resumed, *kept))


def sent_ends(first: int, resumed: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Where the parts of a hand-off end that begins at `first`: what was restored up to `resumed` comes to exist at
    once, the rest with the chunks."""
    restored = (resumed,) if resumed > first else ()
    return (*restored, *(end for end in ends if end > max(first, resumed)))


@dataclass(frozen=True, slots=True)
class Piece:
    """One put: what the cache lacks of the rows up to `stop`, and with `state` the states there."""

    stop: int
    state: bool = False
    proven: bool = True


def pieces(kv_tokens: int, states: Sequence[Checkpoint], known_tokens: int = 0) -> tuple[Piece, ...]:
    """The puts for a sequence whose rows exist up to `kv_tokens` and whose states exist at `states`, shortest first, as
    each stands on those before it. One for each state, since a span has states at its end only, and for the rows one as
    often as a transfer is full. The cache has the rows up to `known_tokens` already."""
    kept = {each.tokens: each.proven for each in states if 0 < each.tokens <= whole_units(kv_tokens)}
    full = {stop for _, stop in transfers(0, whole_units(kv_tokens)) if stop > known_tokens}
    return tuple(Piece(stop, state=stop in kept, proven=kept.get(stop, True)) for stop in sorted(kept.keys() | full))


def alignment_tokens(handoff_tokens: int, match: Match) -> int:
    """Tokens that are computed although the cache has all it could have of them: those behind the last whole unit."""
    return handoff_tokens - match.kv if match.kv and match.kv == whole_units(handoff_tokens) else 0
