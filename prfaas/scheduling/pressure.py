"""How hard each part of the prefill path is pressed at a threshold: the link, the remote nodes, the local ones.

A pressure is what is asked of a part over what it can give to new work; above 1 its queue grows. What crosses the link
is what is offered, or what busy remote nodes can make, whichever is less:

    egress(t) = min( lambda * P(L>t), N / E[T(L) | L>t] ) * E[S_kv(L) | L>t]

So raising t relieves the link as long as the nodes keep up, and after that only where Phi_kv falls with length.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.profile import Profile
from prfaas.scheduling.lengths import Integral, Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What there is for prefill, in whole nodes, less what is needed to work off the backlog; None: not known."""

    remote_nodes: float
    local_nodes: float
    link_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """`link` is None where the line is not known."""

    threshold_tokens: int
    egress_bytes_per_s: float
    link: float | None
    remote: float
    local: float

    @property
    def worst(self) -> float:
        return max(self.remote, self.local, 0.0 if self.link is None else self.link)


@dataclass(frozen=True, slots=True)
class PressureModel:
    """One distribution of lengths and one profile on each side, prepared for many thresholds."""

    lengths: Lengths
    tokens: Integral
    remote_s: Integral
    remote_bytes: Integral
    local_s: Integral
    #: What lies on each side of the thresholds that were asked for. They are always the same few.
    _cuts: dict[int, "_Cut"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Lengths, remote: Profile, local: Profile) -> "PressureModel":
        return cls(
            lengths,
            lengths.integrated(lambda tokens: tokens),
            lengths.integrated(remote.prefill_s),
            lengths.integrated(remote.kv_bytes),
            lengths.integrated(local.prefill_s),
        )

    def at(self, threshold_tokens: int, arrivals_per_s: float, supply: Supply) -> Pressure:
        cut = self._cut(threshold_tokens)
        remote = _over(arrivals_per_s * cut.remote_s, supply.remote_nodes)
        offered = arrivals_per_s * cut.remote_bytes
        egress = offered / max(1.0, remote)
        return Pressure(
            threshold_tokens=threshold_tokens,
            egress_bytes_per_s=egress,
            link=None if supply.link_bytes_per_s is None else _over(egress, supply.link_bytes_per_s),
            remote=remote,
            local=_over(arrivals_per_s * cut.local_s, supply.local_nodes),
        )

    def _cut(self, threshold_tokens: int) -> "_Cut":
        cut = self._cuts.get(threshold_tokens)
        if cut is None:
            cut = self._cuts[threshold_tokens] = _Cut(
                self.remote_s.above(threshold_tokens),
                self.remote_bytes.above(threshold_tokens),
                self.local_s.below(threshold_tokens),
            )
        return cut

    def short_tokens(self, threshold_tokens: int) -> float | None:
        """E[L | L <= t]; None when nothing is that short."""
        share = 1 - self.lengths.tail(threshold_tokens)
        return self.tokens.below(threshold_tokens) / share if share > 0 else None

    def long_tokens(self, threshold_tokens: int) -> float | None:
        """E[L | L > t]; None when nothing is longer."""
        share = self.lengths.tail(threshold_tokens)
        return self.tokens.above(threshold_tokens) / share if share > 0 else None


class _Cut(NamedTuple):
    """Per request, over all of them: seconds and bytes of those that go to the remote nodes, seconds of the others."""

    remote_s: float
    remote_bytes: float
    local_s: float


def _over(asked: float, given: float) -> float:
    if asked <= 0:
        return 0.0
    return asked / given if given > 0 else math.inf
