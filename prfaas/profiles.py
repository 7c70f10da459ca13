"""The profiles that the configuration names: what each kind of hardware costs, before anything was observed.

`MODEL/HARDWARE` is one that ships. Anything else is a JSON file with a measured table: lengths with seconds of prefill
and MiB of KV, and the two terms of a decode step (the format of a cost model's `config.json`, which is such a file).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from prfaas.curve import Curve
from prfaas.engine.cost_profile import CostConfig
from prfaas.errors import ConfigError
from prfaas.profile import DecodeProfile, Profile, shipped
from prfaas.scheduling.rule import Profiles

#: Sequences that fit together where the file does not say.
MAX_BATCH = 64
SHORTEST_TOKENS = 64


def load_profiles(named: Mapping[str, str], model: str) -> Profiles:
    """By the hardware name that workers report. Raises ConfigError."""
    return MappingProxyType(
        {hardware: load_profile(hardware, source, model) for hardware, source in sorted(named.items())}
    )


def load_profile(hardware: str, source: str, model: str) -> Profile:
    """Raises ConfigError."""
    path = Path(source)
    if path.suffix == ".json":
        return _measured(hardware, path, model)
    shipped_model, _, shipped_hardware = source.rpartition("/")
    return shipped(shipped_model, shipped_hardware)


def _measured(hardware: str, path: Path, model: str) -> Profile:
    where = f"profile of {hardware}"
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=CostConfig)
    except OSError as error:
        raise ConfigError(where, f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(where, f"{path}: {error}") from error
    return profile_of(costs, hardware, model)


def profile_of(costs: CostConfig, hardware: str, model: str) -> Profile:
    """Sampled at the table's lengths and at each doubling in between, where the straight lines of the table bend."""
    layout, last = costs.layout(), costs.profile[-1].tokens
    lengths = {point.tokens for point in costs.profile} | {
        SHORTEST_TOKENS << step for step in range((last // SHORTEST_TOKENS).bit_length())
    }
    tokens = sorted(length for length in lengths if length <= last)
    decode = None
    if costs.step_s(1) > 0:
        base_s = costs.step_s(0)
        decode = DecodeProfile(base_s, costs.step_s(1) - base_s, MAX_BATCH)
    return Profile(
        hardware=hardware,
        model=model,
        prefill=Curve.through(((length, costs.prefill_s(length)) for length in tokens), from_zero=True),
        kv=Curve.through((length, layout.size_bytes(length)) for length in tokens),
        decode=decode,
    )
