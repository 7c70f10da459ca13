"""A trace of prompts replayed through one node's cache: how much of the input need not be computed again.

Real machines do it: the cache of a node decides what it keeps and gives up, as in a shard, which has prompts whole, and
an index follows its changes, as a router's does. The two must agree on every match.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cache.dense import DenseLru
from prfaas.cluster import NodeId
from prfaas.kvcache.eviction import Sizes
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.node_cache import EVICT_ABOVE, NodeCache
from prfaas.kvcache.prefix import ChangeKind, PrefixIndex
from prfaas.kvcache.radix import units
from prfaas.kvcache.states import checkpoints
from prfaas.request import Match
from prfaas.sim.replay import BlockKeys
from prfaas.sim.trace_files import BLOCK_TOKENS, TraceFormat, read

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl"
#: S_kv(l) = a + b*l of the model, and what prefix objects may take; None is without bound.
STATE_BYTES, BYTES_PER_TOKEN = 43_000_000, 8_000
POOLS_GIB = (None, 64, 256)
OURS, DENSE = "last+junction+8k", "dense+lru"

_NODE = NodeId("p0")
_BLOCK = BLOCK_TOKENS[TraceFormat.MOONCAKE]
_UNBOUNDED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Hits are in per cent of all prompts' tokens. `states` are left at the end; `evictions` are objects or runs of
    them that went; microseconds are CPU time for a request, the worst admission in milliseconds."""

    trace: str
    pool_gib: int | None
    policy: str
    joint_hit: float
    kv_hit: float | None
    states: int
    evictions: int
    lookup_us: float | None
    admit_us: float | None
    admit_worst_ms: float | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: int
    blocks: tuple[int, ...]
    keys: bytes

    @property
    def handoff_tokens(self) -> int:
        """What a prefill computes and a cache can keep: all but the last token, and only blocks that are known."""
        return min(self.tokens - 1, units(self.keys) * HASH_UNIT_TOKENS)


def measure() -> Iterator[Replayed]:
    prompts = _prompts(TRACE)
    for pool_gib in POOLS_GIB:
        yield _ours(prompts, pool_gib)
        yield _dense(prompts, pool_gib)


def _prompts(path: Path) -> list[_Prompt]:
    keys = BlockKeys(_BLOCK)
    return [
        _Prompt(traced.prompt_tokens, traced.blocks[: traced.prompt_tokens // _BLOCK], keys.of(traced))
        for traced in read(path, TraceFormat.MOONCAKE, seed=0)
    ]


def _ours(prompts: Sequence[_Prompt], pool_gib: int | None) -> Replayed:
    cache = NodeCache(
        _NODE,
        int(_usable_bytes(pool_gib) / EVICT_ABOVE),
        Sizes(state=STATE_BYTES, unit=BYTES_PER_TOKEN * HASH_UNIT_TOKENS),
    )
    index = PrefixIndex()
    joint = kv = evictions = 0
    lookup_s = admit_s = worst_s = 0.0
    for prompt in prompts:
        told = index.match(prompt.keys, prompt.handoff_tokens).get(_NODE, Match())
        started = time.thread_time()
        found = cache.lookup(prompt.keys, prompt.handoff_tokens)
        looked_up = time.thread_time()
        changes = cache.admit(prompt.keys, prompt.handoff_tokens, checkpoints(prompt.handoff_tokens, found))
        admitted_s = time.thread_time() - looked_up
        admit_s, worst_s = admit_s + admitted_s, max(worst_s, admitted_s)
        lookup_s += looked_up - started
        assert found == told, f"the index says {told}, the cache has {found}"
        joint, kv = joint + found.joint, kv + found.kv
        for change in changes:
            index.apply(_NODE, change)
            evictions += change.kind in (ChangeKind.KV_REMOVED, ChangeKind.STATE_REMOVED)
    cache.check()
    index.check()
    tokens = sum(prompt.tokens for prompt in prompts)
    return Replayed(
        trace=TRACE.stem,
        pool_gib=pool_gib,
        policy=OURS,
        joint_hit=100 * joint / tokens,
        kv_hit=100 * kv / tokens,
        states=sum(len(run.states) for run in index.runs()),
        evictions=evictions,
        lookup_us=1e6 * lookup_s / len(prompts),
        admit_us=1e6 * admit_s / len(prompts),
        admit_worst_ms=1e3 * worst_s,
    )


def _dense(prompts: Sequence[_Prompt], pool_gib: int | None) -> Replayed:
    cache = DenseLru(_usable_bytes(pool_gib), STATE_BYTES, _BLOCK * BYTES_PER_TOKEN)
    joint = sum(cache.serve(prompt.blocks, prompt.handoff_tokens // _BLOCK) for prompt in prompts)
    return Replayed(
        trace=TRACE.stem,
        pool_gib=pool_gib,
        policy=DENSE,
        joint_hit=100 * joint * _BLOCK / sum(prompt.tokens for prompt in prompts),
        kv_hit=None,
        states=cache.states,
        evictions=cache.evictions,
        lookup_us=None,
        admit_us=None,
        admit_worst_ms=None,
    )


def _usable_bytes(pool_gib: int | None) -> int:
    return _UNBOUNDED_BYTES if pool_gib is None else pool_gib << 30
