"""What engines keep of prompts in caches of their own, as far as their nodes tell: a prefill that goes to such a node
goes on from it."""

import time
from collections.abc import Callable, Mapping

import grpc

from prfaas.cluster import OWN_PREFIXES, RESUMES_ANYWHERE, ClusterView, Namespace, Node, NodeId, Pool
from prfaas.errors import PeerUnavailable
from prfaas.live.index_follower import IndexFollower
from prfaas.live.link_grpc import ChannelOptions
from prfaas.request import Match
from prfaas.rpc.v1.cache_pb2_grpc import EngineCacheStub

#: A channel to a worker.
ToNode = Callable[[Node, ChannelOptions], grpc.aio.Channel]


class EngineCaches:
    """As `IndexFollower`, which it has one of."""

    def __init__(
        self,
        router: str,
        view: Callable[[], ClusterView],
        channel: ToNode,
        *,
        bound_bytes: int,
        stale_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._channel = view, channel
        self._seen: Mapping[NodeId, Node] | None = None
        self._engines: dict[NodeId, Pool] = {}
        self._namespaces = frozenset[Namespace]()
        self._follower = IndexFollower(
            router,
            self._wanted,
            self._connect,
            lambda channel: EngineCacheStub(channel).Watch,
            bound_bytes=bound_bytes,
            stale_s=stale_s,
            now=now,
        )
        self.run = self._follower.run
        self.followed, self.state, self.age_s = self._follower.followed, self._follower.state, self._follower.age_s
        self.stale = self._follower.stale

    @property
    def any_current(self) -> bool:
        return self._follower.any_current

    def keeps(self, namespace: Namespace) -> bool:
        """Whether any engine of it is followed."""
        return namespace in self._namespaces

    def holders(self, keys: bytes, limit_tokens: int) -> dict[NodeId, Match]:
        """The best of them, and how far a prefill would go on from what each has, best first."""
        found = self._follower.index.holders(keys, limit_tokens, self._follower.heard_since)
        own = {
            name: match.kv if engine.resumes_anywhere else match.joint
            for name, match in found.items()
            if (engine := self._engines.get(name)) is not None
        }
        return {name: Match(own=own[name]) for name in sorted(own, key=lambda name: (-own[name], name)) if own[name]}

    def _wanted(self) -> Mapping[NodeId, Pool]:
        """The nodes that tell, as the caches that they are."""
        nodes = self._view().nodes
        if nodes is not self._seen:
            self._seen = nodes
            self._engines = {name: _cache(node) for name, node in nodes.items() if OWN_PREFIXES in node.capabilities}
            self._namespaces = frozenset(each.namespace for each in self._engines.values())
        return self._engines

    def _connect(self, pool: Pool, options: ChannelOptions) -> grpc.aio.Channel:
        node = self._view().nodes.get(pool.id)
        if node is None:
            raise PeerUnavailable(pool.id, "it has left the cluster")
        return self._channel(node, options)


def _cache(node: Node) -> Pool:
    return Pool(
        id=node.id,
        region=node.region,
        incarnation=node.incarnation,
        namespace=node.namespace,
        rpc_address=node.rpc_address,
        resumes_anywhere=RESUMES_ANYWHERE in node.capabilities,
    )
