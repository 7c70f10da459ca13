"""What a simulated node is made of: how fast it is, what it has room for, and which rule divides its time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from prfaas.cluster import Node
from prfaas.curve import Curve
from prfaas.profile import DecodeProfile, Profile
from prfaas.sim.content import BlankContent, Content, DigestContent
from prfaas.sim.engine import Engine, SlicedEngine
from prfaas.sim.kernel import Kernel
from prfaas.sim.step_times import StepTimes
from prfaas.sim.turn_engine import TurnEngine

GIB = 1 << 30
#: Never decodes: the profile of a node that only prefills has no step times.
_NEVER = DecodeProfile(base_s=1.0, per_sequence_s=0.0, max_batch=1)


class TimeSharing(Enum):
    """SLICES: each kind of work has its share. TURNS: a decode step, then a chunk, as the embedded engine does."""

    SLICES = "slices"
    TURNS = "turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """`max_prefill_tokens` may wait for prefill, more are refused. `step_limit_s` is the longest time that a decode
    step may take; a node that gives part of its time to prefill decodes smaller batches to keep it. Tokens are handed
    out in batches of `token_batch` after the first."""

    profile: Profile
    kv_room_bytes: int = 400 * GIB
    max_prefill_tokens: int = 1 << 20
    chunk_tokens: int = 2048
    token_batch: int = 256
    step_limit_s: float | None = None
    sharing: TimeSharing = TimeSharing.SLICES
    content: Content = field(default_factory=BlankContent)

    @property
    def decode(self) -> DecodeProfile:
        return self.profile.decode or _NEVER

    def max_batch(self, share: float) -> int:
        """How many sequences a node decodes that gives this share of its time to prefill."""
        if self.step_limit_s is None or share >= 1:
            return self.decode.max_batch
        return max(1, self.decode.batch_within(self.step_limit_s * (1 - share)))

    def engine(self, kernel: Kernel, step_times: StepTimes) -> Engine:
        chunk, batch = self.chunk_tokens, self.token_batch
        match self.sharing:
            case TimeSharing.SLICES:
                return SlicedEngine(kernel, self.decode, chunk_tokens=chunk, token_batch=batch, step_times=step_times)
            case TimeSharing.TURNS:
                return TurnEngine(
                    kernel, self.profile, self.decode, chunk_tokens=chunk, token_batch=batch, step_times=step_times
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A small instance for protocol tests: straight lines, one token a batch, and contents that show what went
    wrong."""

    prefill_s_per_token: float = 0.0005
    step_s: float = 0.02
    state_bytes: int = 20_000
    kv_bytes_per_token: int = 100
    kv_room_bytes: int = 10_000_000
    decode_slots: int = 4

    def everywhere(self) -> Callable[[Node], Instance]:
        """All nodes alike."""
        instance = self.instance()
        return lambda node: instance

    def instance(self) -> Instance:
        return Instance(
            profile=Profile(
                hardware="small",
                model="m",
                prefill=Curve.through(
                    [(1, self.prefill_s_per_token), (2, 2 * self.prefill_s_per_token)], from_zero=True
                ),
                kv=Curve.through([(0, self.state_bytes), (1, self.state_bytes + self.kv_bytes_per_token)]),
                decode=DecodeProfile(base_s=self.step_s, per_sequence_s=0.0, max_batch=self.decode_slots),
            ),
            kv_room_bytes=self.kv_room_bytes,
            token_batch=1,
            content=DigestContent(),
        )
