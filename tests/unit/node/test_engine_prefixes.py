"""Opposite `prfaas/node/engine_prefixes.py`."""

from contextlib import aclosing

from prfaas.cluster import Incarnation, Namespace
from prfaas.kvcache.feed import Changes, SnapshotBegin, SnapshotChunk, SnapshotEnd
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.node.engine_prefixes import EnginePrefixes
from prfaas.rpc.cache import Watch

KEYS = bytes(range(64))


def held(*, state_units: int = 0) -> EnginePrefixes:
    prefixes = EnginePrefixes()
    prefixes.apply([Change(ChangeKind.KV_ADDED, KEYS)])
    if state_units:
        prefixes.apply([Change(ChangeKind.STATE_ADDED, KEYS[: 16 * state_units])])
    return prefixes


def test_a_prefill_goes_on_where_its_model_can():
    assert held().resumed(KEYS, 1000, anywhere=True) == 256
    assert held().resumed(KEYS, 200, anywhere=True) == 200
    assert held().resumed(KEYS, 1000, anywhere=False) == 0
    assert held(state_units=3).resumed(KEYS, 1000, anywhere=False) == 192
    assert held().resumed(bytes(64), 1000, anywhere=True) == 0
    assert held().units == 4


async def test_what_was_heard_before_a_router_came_is_in_its_snapshot():
    """The engine speaks before the node serves anybody."""
    prefixes = held(state_units=4)
    feed = prefixes.feed(Incarnation(1), Namespace("ns"))
    async with aclosing(feed.watch(Watch("r0"))) as updates:
        kinds = [(await anext(updates)).kind for _ in range(3)]
        whole = (Change(ChangeKind.KV_ADDED, KEYS), Change(ChangeKind.STATE_ADDED, KEYS))
        assert kinds == [SnapshotBegin(Namespace("ns")), SnapshotChunk(0, whole), SnapshotEnd(1)]
        gone = Change(ChangeKind.KV_REMOVED, KEYS[:16])
        prefixes.apply([gone])
        assert (await anext(updates)).kind == Changes((gone,))
    assert prefixes.units == 0
