"""What a worker's engine has in a cache of its own, for the routers that follow it.

Only this engine can use it, so that it is no part of the region's cache: a prefill that comes here goes on from it.
"""

from collections.abc import Sequence
from functools import partial

from prfaas.cluster import Incarnation, Namespace, NodeId
from prfaas.kvcache.prefix import Change, PrefixIndex
from prfaas.kvcache.snapshots import pieces
from prfaas.node.pool_feed import Feed

_SELF = NodeId("")


class EnginePrefixes:
    """The engine begins with nothing; an engine without such a cache never says anything."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._feed: Feed | None = None

    @property
    def units(self) -> int:
        """Held, of all tenants."""
        return self._index.size.units

    def feed(self, incarnation: Incarnation, namespace: Namespace) -> Feed:
        """For this life of the worker; what was heard before is in its snapshots."""
        self._feed = Feed(incarnation, namespace, partial(pieces, self._index, _SELF))
        return self._feed

    def resumed(self, keys: bytes, limit_tokens: int, *, anywhere: bool) -> int:
        """Where a prefill of the prompt would go on. `anywhere`: wherever its KV ends."""
        found = self._index.find(keys, limit_tokens).at(_SELF)
        return found.kv if anywhere else found.joint

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._index.apply(_SELF, change)
        if self._feed is not None:
            self._feed.publish(changes)
