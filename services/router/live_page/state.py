"""What the live page shows, as JSON: one router's view of the cluster, and what it does itself.

Worked out when it is asked for and never otherwise, out of what the router knows already: nothing is waited for. Its
size has a bound, whatever the size of the cluster.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec

from prfaas.kvcache.feed import Copy
from prfaas.live.control_ports import LiveControlPorts
from prfaas.live.decisions import Decided
from prfaas.live.pools import CachePools, Followed
from prfaas.live.steering import Steering
from prfaas.membership.election import Election
from prfaas.membership.follow import ClusterFollower
from prfaas.scheduling.admission import Admission
from services.router.breaker_metrics import described_breakers
from services.router.explain import described_links
from services.router.live_page.nodes import Departures, described_nodes
from services.router.live_page.tally import Tally
from services.router.operator import Operator, described_outcome

MAX_TENANTS, MAX_ROUTERS, MAX_LINKS, MAX_SHARDS = 25, 25, 100, 25
#: Of a copy of a shard's index: which are told first.
WORST = {Copy.STALE: 0, Copy.HELD: 1, Copy.SYNCING: 2, Copy.CURRENT: 3}


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is told. `find`: only nodes in which all these words occur. Nodes that need a look come first, then by
    name; `busiest`: by how busy they are."""

    nodes: Annotated[int, msgspec.Meta(ge=0, le=500)] = 100
    decisions: Annotated[int, msgspec.Meta(ge=0, le=100)] = 25
    find: Annotated[str, msgspec.Meta(max_length=100)] = ""
    busiest: bool = False


@dataclass(slots=True, kw_only=True)
class LiveState:
    """Of one router process. `now` is monotonic."""

    router: str
    cluster: str
    model: str
    operator: Operator
    follower: ClusterFollower
    election: Election
    steering: Steering
    ports: LiveControlPorts
    admission: Admission
    tally: Tally
    caches: CachePools | None
    now: Callable[[], float]
    begun_s: float
    departures: Departures

    def state(self, shown: Shown) -> dict[str, Any]:
        now, view = self.now(), self.follower.view()
        gone = self.departures.look(view.nodes, now)
        nodes = described_nodes(
            view, self.follower, gone, now, limit=shown.nodes, find=shown.find, busiest=shown.busiest
        )
        links = described_links(self.steering.situation.links)
        return {
            "at_seconds": now,
            "router": self._router(now),
            **nodes,
            "links": {"total": len(links), "shown": links[:MAX_LINKS]},
            "breakers": described_breakers(self.steering.breakers, now),
            "threshold": self._threshold(),
            "plan": self._plan(),
            "routers": self._routers(),
            "admission": self._admission(now),
            "cache": self._cache(),
            "requests": self.tally.described(),
            "decisions": [_decision(each, now) for each in self.steering.decisions.latest(shown.decisions)],
        }

    def _router(self, now: float) -> dict[str, Any]:
        age_s = self.follower.age_s()
        return {
            "id": self.router,
            "cluster": self.cluster,
            "model": self.model,
            "uptime_seconds": now - self.begun_s,
            "leads": self.election.leads,
            "leader": self.election.leader,
            "view_age_seconds": age_s if age_s < float("inf") else None,
        }

    def _threshold(self) -> dict[str, Any]:
        routing = self.steering.routing
        return {
            **self.operator.threshold(),
            "effective_threshold_tokens": routing.bounded_threshold_tokens,
            "t_min_tokens": routing.t_min,
            "t_force_tokens": routing.t_force,
            "abundant": routing.abundant,
        }

    def _plan(self) -> dict[str, Any]:
        direction = self.follower.direction
        plan = direction.plan
        return {
            "epoch": plan.epoch if plan is not None else None,
            "threshold_tokens": plan.threshold_tokens if plan is not None else None,
            "nodes": len(plan.shares) if plan is not None else 0,
            "reason": plan.reason if plan is not None else None,
            "made_by": plan.made_by if plan is not None else None,
            "lost": direction.plan_lost,
            "refused": direction.refused_plans,
            "highest_epoch": self.follower.view().highest_epoch,
            "last_round": described_outcome(self.ports.outcome),
        }

    def _routers(self) -> dict[str, Any]:
        routers = self.follower.direction.routers
        shown = [routers[name] for name in sorted(routers)[:MAX_ROUTERS]]
        return {
            "total": len(routers),
            "shown": [
                {"id": each.router, "arrivals_per_s": each.arrivals_per_s, "admin": each.admin or None}
                for each in shown
            ],
        }

    def _admission(self, now: float) -> dict[str, Any]:
        machine, uses = self.admission, self.admission.uses(now)
        most = sorted(uses, key=lambda name: (-(uses[name].running_tokens + uses[name].waiting_tokens), name))
        params = machine.params
        return {
            "running": machine.running,
            "max_running": machine.places,
            "running_tokens": machine.running_tokens,
            "max_running_tokens": params.max_running_tokens,
            "waiting": len(machine.turns),
            "max_waiting": params.max_queued_requests,
            "waiting_tokens": machine.turns.tokens,
            "max_waiting_tokens": params.max_queued_tokens,
            "tenants": {
                "total": len(uses),
                "shown": [{"tenant": name, **asdict(uses[name])} for name in most[:MAX_TENANTS]],
            },
        }

    def _cache(self) -> dict[str, Any] | None:
        """None where caching is off."""
        caches = self.caches
        if caches is None:
            return None
        states = [(caches.state(each), each) for each in caches.followed()]
        counts = Counter(state.value for state, _ in states)
        worst = sorted(states, key=lambda one: (WORST[one[0]], one[1].pool.id))[:MAX_SHARDS]
        return {
            "index_bytes": caches.index.nbytes,
            "forgotten_blocks": caches.index.forgotten_units,
            "states": {state.value: counts[state.value] for state in Copy},
            "shards": {"total": len(states), "shown": [_shard(caches, state, each) for state, each in worst]},
        }


def _shard(caches: CachePools, state: Copy, each: Followed) -> dict[str, Any]:
    return {
        "id": each.pool.id,
        "region": each.pool.region,
        "state": state.value,
        "age_seconds": caches.age_s(each) if each.heard_at is not None else None,
        "updates": each.updates,
        "behind": each.behind or None,
    }


def _decision(decided: Decided, now: float) -> dict[str, Any]:
    """In short; the whole of it is what `explain` tells."""
    story, outcome = decided.story, decided.outcome
    route = story.route
    return {
        "id": decided.request_id,
        "age_seconds": now - decided.begun_s,
        "prompt_tokens": decided.prompt_tokens,
        "path": route.path.value if route is not None else None,
        "reason": route.reason.value if route is not None else None,
        "prefill": route.prefill if route is not None else None,
        "decode": route.decode if route is not None else None,
        "uncached_tokens": route.uncached_tokens if route is not None else None,
        "threshold_tokens": route.threshold_tokens if route is not None else None,
        "predicted_ttft_seconds": route.predicted_ttft_s if route is not None else None,
        "attempts": len(story.attempts),
        "ending": story.attempts[-1].ending.value if story.attempts else None,
        "output_tokens": story.output_tokens,
        "finish": story.finish.value if story.finish is not None else None,
        "status": outcome.get("status"),
        "error": outcome.get("error"),
        "ttft_seconds": outcome.get("ttft_seconds"),
        "account": outcome.get("ttft_account"),
    }
