"""What a worker takes on: pure bookkeeping of sequences, their tokens, and prefills in hand.

A reservation counts prompt and output tokens from the moment it is made, so that growth is admitted before it happens.
Every charge has an attempt as its owner and is given back exactly once.
"""

from dataclasses import dataclass

from prfaas.errors import Overloaded
from prfaas.request import AttemptId


@dataclass(frozen=True, slots=True)
class Limits:
    max_sequences: int
    max_tokens: int
    max_prefill_tokens: int
    max_prefills: int


class Admission:
    """`max_prefills` may be changed with the role: a node that only decodes still takes a bounded number."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sequences: dict[AttemptId, int] = {}
        self._prefills: dict[AttemptId, int] = {}
        self.committed_tokens = 0
        self.prefill_tokens = 0
        self.refused = 0

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @property
    def prefills(self) -> int:
        return len(self._prefills)

    def take_sequence(self, attempt: AttemptId, tokens: int) -> None:
        """Raises Overloaded when the sequence does not fit."""
        if len(self._sequences) >= self.limits.max_sequences:
            self._refuse("sequences")
        if self.committed_tokens + tokens > self.limits.max_tokens:
            self._refuse("tokens")
        assert attempt not in self._sequences
        self._sequences[attempt] = tokens
        self.committed_tokens += tokens

    def take_prefill(self, attempt: AttemptId, tokens: int) -> None:
        """Raises Overloaded when the prefill queue is full. One prompt is always accepted by an idle node."""
        if len(self._prefills) >= self.limits.max_prefills:
            self._refuse("prefills")
        if self._prefills and self.prefill_tokens + tokens > self.limits.max_prefill_tokens:
            self._refuse("prefill tokens")
        assert attempt not in self._prefills
        self._prefills[attempt] = tokens
        self.prefill_tokens += tokens

    def recount_prefill(self, attempt: AttemptId, tokens: int) -> None:
        """Less of the prompt than thought is there already. It was taken on, and now stays."""
        self.prefill_tokens += tokens - self._prefills[attempt]
        self._prefills[attempt] = tokens

    def end_prefill(self, attempt: AttemptId) -> None:
        self.prefill_tokens -= self._prefills.pop(attempt, 0)

    def release(self, attempt: AttemptId) -> None:
        """Give back whatever the attempt holds. Idempotent."""
        self.end_prefill(attempt)
        self.committed_tokens -= self._sequences.pop(attempt, 0)

    def check(self) -> None:
        assert self.committed_tokens == sum(self._sequences.values()) <= self.limits.max_tokens
        assert self.prefill_tokens == sum(self._prefills.values())
        assert len(self._sequences) <= self.limits.max_sequences

    def _refuse(self, resource: str) -> None:
        self.refused += 1
        raise Overloaded(resource)
