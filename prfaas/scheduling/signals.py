"""What the fast loop goes by, read out of one view. What is missing stays missing: the controller knows what to do."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prfaas.cluster import ClusterView, LinkState, Node, NodeId, RegionId
from prfaas.profile import Profile
from prfaas.request import Mode
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.prediction import prefill_share
from prfaas.scheduling.rule import Pair, Profiles

#: Nodes of different hardware are added up by how fast they prefill a prompt of this length.
REFERENCE_TOKENS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Of one model. Nodes are counted in nodes of the profile's hardware that do nothing else; a backlog is the seconds
    of prefill that wait in front of the average node. `pinned_*` is what an operator wants instead."""

    plan_threshold_tokens: int
    link: LinkState | None = None
    demand: DemandSnapshot | None = None
    remote_profile: Profile | None = None
    remote_nodes: float = 0.0
    remote_backlog_s: float | None = None
    local_profile: Profile | None = None
    local_nodes: float = 0.0
    local_backlog_s: float | None = None
    #: No node of another region can be reached, or none has been heard of while those here are.
    unreachable: bool = False
    pinned_mode: Mode | None = None
    pinned_threshold_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The nodes of one side together."""

    profile: Profile | None
    nodes: float
    backlog_s: float | None


def read(
    view: ClusterView,
    model: str,
    pd_region: RegionId,
    profiles: Profiles,
    links: Mapping[Pair, LinkState],
    demand: DemandSnapshot | None,
    plan_threshold_tokens: int,
    *,
    short_tokens: float | None = None,
    long_tokens: float | None = None,
    unreachable: bool = False,
    pinned_mode: Mode | None = None,
    pinned_threshold_tokens: int | None = None,
) -> Signals:
    """`short_tokens` and `long_tokens` are what the last decision found: what those in the queues are like."""
    remote = [node for name in view.remote_prefill if (node := view.nodes[name]).model == model]
    local = [node for name in view.local_prefill if (node := view.nodes[name]).model == model]
    far, near = stage(remote, profiles, long_tokens), stage(local, profiles, short_tokens)
    return Signals(
        plan_threshold_tokens=plan_threshold_tokens,
        link=_tightest(sorted({node.region for node in remote}), pd_region, links),
        demand=demand,
        remote_profile=far.profile,
        remote_nodes=far.nodes,
        remote_backlog_s=far.backlog_s,
        local_profile=near.profile,
        local_nodes=near.nodes,
        local_backlog_s=near.backlog_s,
        unreachable=unreachable,
        pinned_mode=pinned_mode,
        pinned_threshold_tokens=pinned_threshold_tokens,
    )


def stage(nodes: list[Node], profiles: Profiles, usual_tokens: float | None) -> Stage:
    """In nodes of the most common hardware that has a profile."""
    known = [node for node in nodes if node.hardware in profiles]
    if not known:
        return Stage(None, float(len(nodes)), None)
    counts = Counter(node.hardware for node in known)
    profile = profiles[min(counts, key=lambda hardware: (-counts[hardware], hardware))]
    speeds = {name: profile.prefill_s(REFERENCE_TOKENS) / profiles[name].prefill_s(REFERENCE_TOKENS) for name in counts}
    capacity = sum(speeds[node.hardware] * prefill_share(node) for node in known)
    tokens = max(1.0, REFERENCE_TOKENS if usual_tokens is None else usual_tokens)
    waiting_s = sum(node.load.queued_prefill_tokens for node in known) * profile.prefill_s(tokens) / tokens
    return Stage(profile, capacity, waiting_s / capacity)


def is_silent(
    remote: Iterable[NodeId], local: Iterable[NodeId], reported_at: Callable[[NodeId], float | None], after: float
) -> bool:
    """Nothing was heard from any remote node since `after`, though something was from a local one. When all are silent
    it is the store that is lost, which says nothing about the link."""

    def heard(names: Iterable[NodeId]) -> bool:
        return any((at := reported_at(name)) is not None and at >= after for name in names)

    names = tuple(remote)
    return bool(names) and not heard(names) and heard(local)


def _tightest(sources: Iterable[RegionId], target: RegionId, links: Mapping[Pair, LinkState]) -> LinkState | None:
    """Of the links that are used; one that nothing is known of counts as the tightest."""
    used = [links.get((source, target)) for source in sources]
    if not used or any(link is None for link in used):
        return None
    return max((link for link in used if link is not None), key=lambda link: (link.age_s, link.utilization or 0.0))
