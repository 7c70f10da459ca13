"""Who was away when, and which PD nodes each router can have known of.

That a node is back, at which address and in which role, a router hears from the store: not while the store is away, and
not while the router itself stands still. Until then it sends requests to where the node was.
"""

from collections.abc import Collection

#: What who was away, or has come back, does not know of yet: reports come once a second.
GRACE_S = 2.0
NEVER, STILL = float("-inf"), float("inf")


class Presence:
    """Times are those of the last moment that something was away: `NEVER`, or `STILL` as long as it is."""

    def __init__(self, routers: Collection[str], nodes: Collection[str]) -> None:
        self._routers, self._nodes = routers, nodes
        self._away = dict.fromkeys((*routers, *nodes), NEVER)
        self._store_away = NEVER
        #: Since a router last took a node to be elsewhere, or in another role, than it was.
        self._mistaken = dict.fromkeys(((router, node) for router in routers for node in nodes), NEVER)

    def gone(self, name: str) -> None:
        """Of other processes than routers and PD nodes nothing is kept."""
        if name in self._away:
            self._away[name] = STILL
        if name in self._nodes:
            self._mistaken |= dict.fromkeys(((router, name) for router in self._routers), STILL)

    def back(self, name: str, now: float) -> None:
        self._away[name] = now

    def store_gone(self) -> None:
        self._store_away = STILL

    def store_back(self, now: float) -> None:
        self._store_away = now

    def away(self) -> list[str]:
        return [name for name, at in self._away.items() if at == STILL]

    def look(self, now: float) -> None:
        """Routers that have run for a while beside the store know of the nodes that have been there as long."""
        for (router, node), at in self._mistaken.items():
            told_of = max(self._store_away, self._away[router], self._away[node]) + GRACE_S
            if at == STILL and told_of <= now:
                self._mistaken[router, node] = now

    def hurt(self, name: str, since: float) -> bool:
        """Whether it was away at any time since then."""
        return self._away[name] + GRACE_S >= since

    def explanation(self, routers: Collection[str], since: float) -> str | None:
        """Why who asked these routers since then could not be served, if that was so."""
        if all(self.hurt(router, since) for router in routers):
            return "its routers were away"
        if all(self.hurt(router, since) or self._knew_none(router, since) for router in routers):
            return "its routers could know of no PD node that was there"
        return None

    def _knew_none(self, router: str, since: float) -> bool:
        return all(self.hurt(node, since) or self._mistaken[router, node] + GRACE_S >= since for node in self._nodes)
