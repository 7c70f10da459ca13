"""The prefix caches of all simulated nodes, by the real machines of `kvcache`, and the index that routers match in.

Prompts of a simulation have no contents, only keys. The index follows the caches at once; that index events travel, and
may be missed, is left out here.
"""

from collections.abc import Mapping
from types import MappingProxyType

from prfaas.cluster import NodeId
from prfaas.kvcache.eviction import Sizes
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.node_cache import NodeCache
from prfaas.kvcache.prefix import PrefixIndex
from prfaas.kvcache.radix import units
from prfaas.kvcache.states import checkpoints
from prfaas.profile import Profile
from prfaas.request import Match, Matches, Request, RequestId

#: S_kv(l) = a + b*l is read off between these.
_SHORT, _LONG = 1024, 32 * 1024


class Caches:
    """`capacity_bytes` of each node; a node that is not named keeps nothing."""

    def __init__(self, profile: Profile, capacity_bytes: Mapping[NodeId, int] = MappingProxyType({})) -> None:
        self._per_token = max(1, round((profile.kv(_LONG) - profile.kv(_SHORT)) / (_LONG - _SHORT)))
        self._state = max(1, round(profile.kv(_SHORT) - self._per_token * _SHORT))
        self._capacity_bytes = capacity_bytes
        self._nodes = {node: self._new(node) for node in capacity_bytes}
        self._index = PrefixIndex()
        self._keys: dict[RequestId, bytes] = {}
        #: Of all prefills that have begun: their tokens, and those that were cached.
        self.prompt_tokens = self.skipped_tokens = 0

    def arrive(self, request: RequestId, keys: bytes) -> None:
        """From now until it leaves this request has these keys."""
        if keys and self._nodes:
            self._keys[request] = keys

    def leave(self, request: RequestId) -> None:
        self._keys.pop(request, None)

    def matches(self, request: Request) -> Matches:
        """What a router finds."""
        return self._index.match(self._keys.get(request.id, b""), request.handoff_tokens)

    def held(self, node: NodeId, request: Request) -> Match:
        """What a node holds, without making use of it."""
        if node not in self._nodes or request.id not in self._keys:
            return Match()
        return self._index.find(self._keys[request.id], request.handoff_tokens).at(node)

    def resume(self, node: NodeId, request: Request) -> Match:
        """A prefill begins on the node."""
        self.prompt_tokens += request.handoff_tokens
        if node not in self._nodes or request.id not in self._keys:
            return Match()
        match = self._nodes[node].lookup(self._keys[request.id], request.handoff_tokens)
        self.skipped_tokens += match.joint
        return match

    def computed(self, node: NodeId, request: Request, resumed: Match) -> None:
        """A prefill has ended on the node: its KV stays there, and the states that are worth keeping."""
        if node in self._nodes and request.id in self._keys:
            keys = self._keys[request.id]
            # The end of a traced prompt may have no keys.
            known_tokens = min(request.handoff_tokens, units(keys) * HASH_UNIT_TOKENS)
            changes = self._nodes[node].admit(keys, known_tokens, checkpoints(known_tokens, resumed))
            for change in changes:
                self._index.apply(node, change)

    def received(self, node: NodeId, request: Request) -> None:
        """KV has arrived from elsewhere. The state that came with it is decode's to change, so none is kept."""
        if node in self._nodes and request.id in self._keys:
            for change in self._nodes[node].admit(self._keys[request.id], request.handoff_tokens, ()):
                self._index.apply(node, change)

    def lose(self, node: NodeId) -> None:
        """The node died, and with it what it held."""
        if node in self._nodes:
            self._index.remove_owner(node)
            self._nodes[node] = self._new(node)

    def check(self) -> None:
        for cache in self._nodes.values():
            cache.check()

    def _new(self, node: NodeId) -> NodeCache:
        return NodeCache(node, self._capacity_bytes[node], Sizes(self._state, self._per_token * HASH_UNIT_TOKENS))
