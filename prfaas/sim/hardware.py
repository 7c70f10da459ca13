"""How fast the simulated hardware is: profiles that ship, or tables in the scenario."""

from typing import Annotated

from msgspec import Meta

from prfaas.curve import Curve
from prfaas.errors import ConfigError
from prfaas.profile import DecodeProfile, Profile, shipped
from prfaas.scheduling.rule import Profiles
from prfaas.sim.structs import Section

Cost = Annotated[float, Meta(ge=0)]


class DecodeTable(Section, frozen=True):
    base_s: Cost
    per_sequence_s: Cost
    max_batch: Annotated[int, Meta(ge=1)]

    def __post_init__(self) -> None:
        if self.base_s + self.per_sequence_s <= 0:
            raise ValueError("base_s: a decode step takes time")


class HardwareTable(Section, frozen=True):
    """Measured at the same lengths: seconds of prefill, bytes of KV. Without `decode` it never decodes."""

    tokens: tuple[Annotated[int, Meta(ge=1)], ...]
    prefill_s: tuple[Cost, ...]
    kv_bytes: tuple[Cost, ...]
    decode: DecodeTable | None = None

    @classmethod
    def of(cls, profile: Profile, tokens: tuple[int, ...]) -> "HardwareTable":
        """A profile read off at these lengths."""
        decode = profile.decode
        return cls(
            tokens=tokens,
            prefill_s=tuple(profile.prefill_s(length) for length in tokens),
            kv_bytes=tuple(profile.kv_bytes(length) for length in tokens),
            decode=None
            if decode is None
            else DecodeTable(base_s=decode.base_s, per_sequence_s=decode.per_sequence_s, max_batch=decode.max_batch),
        )

    def profile(self, hardware: str, model: str) -> Profile:
        decode = self.decode
        return Profile(
            hardware=hardware,
            model=model,
            prefill=Curve.through(zip(self.tokens, self.prefill_s, strict=True), from_zero=True),
            kv=Curve.through(zip(self.tokens, self.kv_bytes, strict=True)),
            decode=None if decode is None else DecodeProfile(decode.base_s, decode.per_sequence_s, decode.max_batch),
        )


def profiles_of(names: list[str], model: str, tables: dict[str, HardwareTable]) -> Profiles:
    """By hardware, in the order of the names. Raises ConfigError for one that neither ships nor is in a table."""
    found = {}
    for name in names:
        try:
            found[name] = tables[name].profile(name, model) if name in tables else shipped(model, name)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"hardware.{name}", str(error)) from error
    return found
