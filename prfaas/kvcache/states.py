"""Which recurrent states a prefill keeps, and what a cached prefix is worth with the states there are (R6, R8).

A state is as large as thousands of tokens of KV and good at one length only, so few are kept: the last boundary of the
prompt, from which the next turn goes on; the *junction*, where this prompt left an older one, as others will leave it
there too; and one every few thousand tokens, in case a later prompt leaves in the middle. The last kind is *unproven*
until something resumes there. Lengths are tokens that prefill computes: all of a prompt but its last.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.request import Match

EVERY_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state to keep, at `tokens`."""

    tokens: int
    proven: bool


def checkpoints(
    handoff_tokens: int, match: Match, every_tokens: int = EVERY_TOKENS, spacing_tokens: int = HASH_UNIT_TOKENS
) -> tuple[Checkpoint, ...]:
    """The states that a prefill resumed at `match.joint` keeps while it passes them, shortest first.

    They stand at multiples of `spacing_tokens`: complete hash units, or what the kernels of a model can stop at.
    """
    assert spacing_tokens % HASH_UNIT_TOKENS == 0 and every_tokens % spacing_tokens == 0, "states stand on whole units"
    last = handoff_tokens // spacing_tokens * spacing_tokens
    junction = min(match.kv, handoff_tokens) // spacing_tokens * spacing_tokens
    proven = {last, junction}
    periodic = range(every_tokens, last, every_tokens)
    return tuple(
        Checkpoint(tokens, tokens in proven) for tokens in sorted(proven.union(periodic)) if tokens > match.joint
    )


def chunk_ends(handoff_tokens: int, match: Match, kept: Sequence[Checkpoint], chunk_tokens: int) -> tuple[int, ...]:
    """Where the chunks of a prefill end, known before the first one is scheduled: on every checkpoint, at multiples of
    `chunk_tokens` and at the end of what is computed (R8)."""
    multiples = range(chunk_tokens, handoff_tokens, chunk_tokens)
    ends = {handoff_tokens, *multiples, *(checkpoint.tokens for checkpoint in kept)}
    return tuple(sorted(end for end in ends if match.joint < end))


def usable_prefix(hit: int, boundaries: Sequence[int]) -> int:
    """How far a prefill can resume within a cached prefix of length `hit`: the last boundary that is no longer.

    `boundaries` rise. Resuming anywhere else would go on from the state of another length.
    """
    at = bisect_right(boundaries, hit)
    return boundaries[at - 1] if at else 0
