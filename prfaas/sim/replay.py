"""A trace as arrivals: scaled, jittered, and with the keys that its blocks stand for."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.sim.scenario import Scenario
from prfaas.sim.trace_files import BLOCK_TOKENS, Traced, TraceFormat, read
from prfaas.sim.workload import Arrival, Trace, Workload, stream

#: Time for the last arrival of a trace.
LAST_S = 1.0


def replaying(scenario: Scenario, path: Path, trace_format: TraceFormat) -> Scenario:
    """The same machines, on which the requests of this trace come, for as long as they do. What does not fit into that
    is not left out of the figures as a warm-up. Raises ConfigError."""
    duration_s = read(path, trace_format, scenario.seed)[-1].at_s + LAST_S
    return scenario.but(
        workload=Workload(trace=Trace(path=str(path), format=trace_format)),
        duration_s=duration_s,
        warm_up_s=scenario.warm_up_s if scenario.warm_up_s < duration_s else 0.0,
    )


def replayed(trace: Trace, folder: Path, seed: int, max_context_tokens: int) -> list[Arrival]:
    """In order of arrival. Prompts that do not fit the context with their output are left out. Raises
    ConfigError, also when that leaves none."""
    chance, keys = stream(seed, "jitter"), BlockKeys(BLOCK_TOKENS.get(trace.format, HASH_UNIT_TOKENS))
    longest = max_context_tokens if trace.max_tokens is None else min(trace.max_tokens, max_context_tokens)
    arrivals = [
        Arrival(
            request.at_s / trace.rate_scale + chance.uniform(0, trace.jitter_s),
            max(2, request.prompt_tokens),
            request.output_tokens,
            keys.of(request),
        )
        for request in read(folder / trace.path, trace.format, seed)
        if request.prompt_tokens + request.output_tokens <= longest
    ]
    if not arrivals:
        raise ConfigError(str(folder / trace.path), f"no prompt fits {longest} tokens with its output")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


class BlockKeys:
    """Keys of hash units from ids of blocks: an id names all of the prompt up to its block, as a key does.

    A block of several units gives each a key of its own. Of smaller blocks the one that completes a unit names it; what
    does not fill a unit has no key. A trace counts its last block even when it is not full: that one is left out.
    """

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens % HASH_UNIT_TOKENS == 0 or HASH_UNIT_TOKENS % block_tokens == 0
        self._block_tokens = block_tokens
        self._known: dict[int, bytes] = {}

    def of(self, request: Traced) -> bytes:
        full = request.blocks[: request.prompt_tokens // self._block_tokens]
        per_unit = max(1, HASH_UNIT_TOKENS // self._block_tokens)
        return b"".join(self._keys(block) for block in full[per_unit - 1 :: per_unit])

    def _keys(self, block: int) -> bytes:
        keys = self._known.get(block)
        if keys is None:
            keys = self._known[block] = b"".join(self._unit_keys(block))
        return keys

    def _unit_keys(self, block: int) -> Iterator[bytes]:
        for unit in range(max(1, self._block_tokens // HASH_UNIT_TOKENS)):
            yield hashlib.blake2b(f"{block}/{unit}".encode(), digest_size=KEY_BYTES).digest()
