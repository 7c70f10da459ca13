"""What the prefix index costs at ten million blocks: a look-up, the memory and following events, beside a plain dict.

The dict has one entry for each block, and a look-up in it goes from block to block: what an index without a tree does.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

from bench.cache.prompts import EVERY, LONG, TURNS, Conversations, Event
from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.kvcache.radix import first_units, units

#: Of the prompts that are looked up: how many, how often each, and of what others have left at every so many units.
_PROMPTS, _ROUNDS, _BRANCHY = 40, 5, 8
#: Every so many conversations one is kept aside, to go and to come back when the index is full.
_ASIDE = 50
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCost:
    """`lookup_branchy_ms` is of prompts that others have left every 512 tokens, `lookup_ms` of such that others have
    left every 8K. `apply_blocks_per_s` counts blocks that come and go in the full index."""

    blocks: int
    lookup_ms: float
    lookup_p99_ms: float
    lookup_branchy_ms: float
    bytes_per_block: float
    fill_blocks_per_s: float
    apply_blocks_per_s: float
    dict_lookup_ms: float
    dict_bytes_per_block: float
    dict_fill_blocks_per_s: float

    @property
    def lookup_speedup(self) -> float:
        return self.dict_lookup_ms / self.lookup_ms

    @property
    def memory_ratio(self) -> float:
        return self.bytes_per_block / self.dict_bytes_per_block

    @property
    def fill_speedup(self) -> float:
        return self.fill_blocks_per_s / self.dict_fill_blocks_per_s


@dataclass(slots=True)
class _Filled:
    """How an index or a dict came to be: blocks told of, seconds to follow, what was kept aside, prompts to look up."""

    blocks: int
    apply_s: float
    aside: list[list[Event]]
    long: list[bytes]
    branchy: list[bytes]


def measure(blocks: int) -> IndexCost:
    before = _resident_bytes()
    index = PrefixIndex()
    filled = _fill(blocks, lambda event: index.apply(event.pool, event.change))
    nbytes = _resident_bytes() - before
    long_s = _times(filled.long, lambda keys: index.match(keys, LONG * HASH_UNIT_TOKENS))
    branchy_s = _times(filled.branchy, lambda keys: index.match(keys, LONG * HASH_UNIT_TOKENS))
    churn = _churn(index, filled.aside)
    index = PrefixIndex()
    plain: dict[bytes, NodeId] = {}
    entered = _fill(blocks, lambda event: _enter(plain, event))
    plain_s = _times(entered.long, lambda keys: _walk(plain, keys))
    plain_bytes = sys.getsizeof(plain) + len(plain) * sys.getsizeof(bytes(KEY_BYTES))
    return IndexCost(
        blocks=filled.blocks,
        lookup_ms=statistics.median(long_s) * 1e3,
        lookup_p99_ms=statistics.quantiles(long_s, n=100)[98] * 1e3,
        lookup_branchy_ms=statistics.median(branchy_s) * 1e3,
        bytes_per_block=nbytes / filled.blocks,
        fill_blocks_per_s=filled.blocks / filled.apply_s,
        apply_blocks_per_s=churn,
        dict_lookup_ms=statistics.median(plain_s) * 1e3,
        dict_bytes_per_block=plain_bytes / len(plain),
        dict_fill_blocks_per_s=entered.blocks / entered.apply_s,
    )


def _fill(blocks: int, apply: Callable[[Event], None]) -> _Filled:
    conversations = Conversations(_SEED)
    filled = _Filled(0, 0.0, [], [], [])

    def tell(events: Iterable[Event]) -> list[Event]:
        told = list(events)
        started = time.thread_time()
        for event in told:
            apply(event)
        filled.apply_s += time.thread_time() - started
        filled.blocks += sum(event.blocks for event in told)
        return told

    for prompts, branch_every in ((filled.long, EVERY), (filled.branchy, _BRANCHY)):
        for _ in range(_PROMPTS):
            keys, events = conversations.long_prompt(branch_every)
            prompts.append(keys)
            tell(events)
    number = 0
    while filled.blocks < blocks:
        told = tell(conversations.conversation())
        if number % _ASIDE == 0:
            filled.aside.append(told)
        number += 1
    return filled


def _churn(index: PrefixIndex, aside: Sequence[Sequence[Event]]) -> float:
    """Blocks a second that go and come back. A conversation goes turn by turn, from its end, and comes back so."""
    turns = [[event for event in told if event.change.kind is ChangeKind.KV_ADDED][-TURNS:] for told in aside]
    gone = [_gone(event) for told in turns for event in reversed(told)]
    # What was told of a system prompt stays.
    back = [event for told in aside for event in told[-2 * TURNS :]]
    seconds = 0.0
    for events, held in ((gone, False), (back, True)):
        started = time.thread_time()
        for event in events:
            index.apply(event.pool, event.change)
        seconds += time.thread_time() - started
        assert all(_holds(index, told[0]) == held and _holds(index, told[-1]) == held for told in turns)
    return sum(event.blocks for event in (*gone, *back)) / seconds


def _holds(index: PrefixIndex, event: Event) -> bool:
    keys = event.change.keys
    return index.find(keys, 0).kv_units(event.pool) == units(keys)


def _gone(event: Event) -> Event:
    """The pool gives up what an event told of: its first block, and all that follows."""
    first = units(event.change.keys) - event.blocks + 1
    return event._replace(change=Change(ChangeKind.KV_REMOVED, first_units(event.change.keys, first)))


def _enter(plain: dict[bytes, NodeId], event: Event) -> None:
    keys = event.change.keys
    for at in range(len(keys) - event.blocks * KEY_BYTES, len(keys), KEY_BYTES):
        plain[keys[at : at + KEY_BYTES]] = event.pool


def _walk(plain: dict[bytes, NodeId], keys: bytes) -> int:
    at = 0
    while keys[at : at + KEY_BYTES] in plain:
        at += KEY_BYTES
    return at


def _times(prompts: Sequence[bytes], look_up: Callable[[bytes], object]) -> list[float]:
    """Seconds of each look-up, the prompts in turn."""
    times = []
    for keys in [*prompts] * _ROUNDS:
        started = time.thread_time()
        look_up(keys)
        times.append(time.thread_time() - started)
    return times


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
