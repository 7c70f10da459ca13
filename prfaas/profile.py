"""What a model costs on one kind of hardware: T_prefill(l), S_kv(l) and the decode step, with what follows from them.

One *instance* is the group of accelerators that serves a model together (a node). Shipped numbers are the paper's, or
say that they are implied or assumed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prfaas.curve import Curve
from prfaas.errors import ConfigError

MIB = 1 << 20
KILO_TOKENS = 1024
#: One Gbps in bytes per second.
GBPS = 1e9 / 8
#: A batch that misses the step limit by no more than rounding fits it.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """A decode step of `batch` sequences takes `base_s + per_sequence_s * batch`; memory holds at most `max_batch`."""

    base_s: float
    per_sequence_s: float
    max_batch: int

    def __post_init__(self) -> None:
        if not (0 <= self.base_s < math.inf and 0 <= self.per_sequence_s < math.inf and self.max_batch >= 1):
            raise ValueError("a decode step takes finite time, not below 0, and a batch holds a sequence or more")
        if self.base_s + self.per_sequence_s <= 0:
            raise ValueError("a decode step takes time")

    def step_s(self, batch: float) -> float:
        return self.base_s + self.per_sequence_s * batch

    def batch_within(self, step_limit_s: float) -> int:
        """The largest batch whose step takes no longer than the limit; 0 when not even one sequence does."""
        if not step_limit_s > 0 or self.step_s(1) > step_limit_s * (1 + ROUNDING):
            return 0
        if self.step_s(self.max_batch) <= step_limit_s * (1 + ROUNDING):
            return self.max_batch
        return math.floor((step_limit_s * (1 + ROUNDING) - self.base_s) / self.per_sequence_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one kind of hardware. `decode` is None where it never decodes.

    `prefill` comes from zero and rises. `kv` may start above 0: hybrid models keep a state of fixed size.
    """

    hardware: str
    model: str
    prefill: Curve
    kv: Curve
    decode: DecodeProfile | None = None

    def __post_init__(self) -> None:
        if not self.prefill.rises or not self.kv.rises:
            raise ValueError("prefill seconds and KV bytes never fall with length")
        if not self.prefill.from_zero or self.prefill.ys[0] <= 0 or self.kv(0) < 0:
            raise ValueError("no tokens take no time, some do, and KV is never below 0 bytes")

    def prefill_s(self, total_tokens: float, cached_tokens: float = 0) -> float:
        """T(total) - T(cached): the time of computing what is not cached, on top of what is."""
        return self.prefill(total_tokens) - self.prefill(cached_tokens)

    def kv_bytes(self, total_tokens: float, cached_tokens: float = 0) -> float:
        """S_kv of what the receiver lacks. The state of fixed size is part of every transfer, cached prefix or not."""
        return self.kv(total_tokens) - (self.kv(cached_tokens) - self.kv(0))

    def phi_bytes_per_s(self, tokens: float) -> float:
        """Phi_kv(l) = S_kv(l) / T_prefill(l), equation 1: what one busy instance puts on the link."""
        seconds = self.prefill(tokens)
        return self.kv(tokens) / seconds if seconds > 0 else math.inf


#: The paper's case study: 1T parameters, KDA and MLA layers, 8 accelerators per instance.
CASE_STUDY = "case-study-1t"
#: Published for 8xH200: tokens, MiB of KV, seconds of prefill.
_CASE_STUDY_TABLE = ((1, 190.8, 0.44), (8, 308.9, 0.72), (32, 701.3, 1.84), (128, 2316.3, 7.40))
#: Implied by the paper's throughput, not published: how much longer 8xH20 take, at these lengths; level outside.
_H20_RATIO = ((0, 2.25), (10_200, 2.25), (27_500, 2.67), (62_400, 2.77), (128 * KILO_TOKENS, 2.77))
#: Assumed so that 20 sequences take the 25 ms of 40 tokens/s; no H20 decode profile is published.
_H20_DECODE = DecodeProfile(base_s=0.007, per_sequence_s=0.0009, max_batch=20)


def _case_study() -> Mapping[str, Profile]:
    kv = Curve.through((kilo * KILO_TOKENS, mib * MIB) for kilo, mib, _ in _CASE_STUDY_TABLE)
    seconds = ((kilo * KILO_TOKENS, seconds) for kilo, _, seconds in _CASE_STUDY_TABLE)
    h200, ratio = Curve.through(seconds, from_zero=True), Curve.through(_H20_RATIO)
    bends = sorted({*h200.xs, *ratio.xs[1:]})
    h20 = Curve.through(((tokens, h200(tokens) * ratio(tokens)) for tokens in bends), from_zero=True)
    profiles = (Profile("h200", CASE_STUDY, h200, kv), Profile("h20", CASE_STUDY, h20, kv, _H20_DECODE))
    return MappingProxyType({profile.hardware: profile for profile in profiles})


_SHIPPED: Mapping[str, Mapping[str, Profile]] = MappingProxyType({CASE_STUDY: _case_study()})

_PHI_GBPS = {
    "kimi-linear-48b": (1.19, 2.29, 3.87, 4.88),
    "mimo-v2-flash-309b": (0.82, 2.85, 4.66, 4.71),
    "qwen3.5-397b": (4.13, 6.28, 8.25, 7.47),
    "ring-2.5-1t": (7.27, 4.47, 2.59, 1.46),
    "minimax-m2.5-229b": (4.94, 32.87, 59.93, 47.82),
    "qwen3-235b": (4.12, 22.42, 33.35, 21.50),
}
#: Phi_kv in bytes per second against tokens, published for 8xH200. Neither T nor S can be had from it alone.
PUBLISHED_PHI: Mapping[str, Curve] = MappingProxyType(
    {
        model: Curve.through((kilo * KILO_TOKENS, gbps * GBPS) for kilo, gbps in zip((1, 8, 32, 128), row, strict=True))
        for model, row in _PHI_GBPS.items()
    }
)


def shipped(model: str, hardware: str) -> Profile:
    """The profile that ships for a model on a kind of hardware; ConfigError when there is none."""
    if model in PUBLISHED_PHI:
        raise ConfigError(
            "profile.model", f"of {model} only Phi_kv is published, not prefill time or KV size: bring measured curves"
        )
    if model not in _SHIPPED:
        raise ConfigError("profile.model", f"no profile ships for {model}; shipped: {', '.join(_SHIPPED)}")
    if hardware not in _SHIPPED[model]:
        known = ", ".join(_SHIPPED[model])
        raise ConfigError("profile.hardware", f"no profile of {model} ships for {hardware}; shipped: {known}")
    return _SHIPPED[model][hardware]
