"""The slow loop: who prefills and who decodes, and the threshold that goes with it.

Each round the planner is asked for the best roles under the demand seen, with the model corrected by what stages
report. The cluster goes there in steps of a few nodes, and only when it is worth it. What must hold:

- Too little data is an answer of its own: roles stay.
- Nodes that have just started or changed count as nodes, but what they report about themselves does not.
- Noise flips nothing: a change must bring a minimum gain, and more than chance explains. It is made when what was lost
  without it has come to what it costs, and not before another round agrees: who always waits for that long loses at
  most twice what one who knew beforehand would have lost. One that goes back counts both ways.
- A node stays what it has become for a minimum time. One step back within that time is never taken.
- What is reported once a second is judged over minutes: how busy nodes are (`watch.py`), and what a link carries
  (`line.py`). The best roles do not depend on the rate of arrivals, so its ups and downs must move none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from prfaas.cluster import ClusterView, LinkState, Node, NodeId, NodeKind, Role
from prfaas.profile import Profile
from prfaas.scheduling.assignment import Change, changes
from prfaas.scheduling.correction import Correction, StageReading, mean
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.gains import error, gain, prefill_gain
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.line import LineMemory
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.readings import known
from prfaas.scheduling.roster import Pool, Roster
from prfaas.scheduling.signals import stage
from prfaas.scheduling.staffing import best_threshold, staffed
from prfaas.scheduling.throughput import Approximation, CostModel, Fleet, Throughput
from prfaas.scheduling.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceParams:
    roles: Roles = Roles.WHOLE
    approximation: Approximation = Approximation.INTEGRAL
    #: The longest decode step that the SLO allows.
    step_limit_s: float = 0.025
    #: Share of the measured line that may be planned with.
    usable_share: float = 0.95
    #: Relative gain in sustained requests/s that a change of roles, and one of t alone, must bring, or more where less
    #: may be chance.
    needed_gain: float = 0.03
    needed_threshold_gain: float = 0.02
    #: Consecutive rounds that must want the same.
    agreeing_rounds: int = 2
    #: A node keeps its role, and the cluster its direction, for at least this long.
    dwell_s: float = 120.0
    #: What a change of roles costs, as the part of `dwell_s` in which the cluster could have served all that it
    #: sustains. It is made when what was forgone without it adds up to that: a large gain is taken soon, a small one
    #: must show for longer. More is calmer and slower.
    change_costs: float = 0.125
    #: Part of the PD nodes that may be between two roles at once, and at least one. Each is missing from both
    #: meanwhile; fewer make the way to a better plan longer.
    converting_share: float = 0.25
    #: A node that has not become what it should after this long is taken for what it is.
    convert_timeout_s: float = 600.0
    #: What a node reports is not used before it has been what it is for so long.
    warm_up_s: float = 60.0
    #: How busy nodes are is averaged over about so long, and says nothing before it was seen for so long under the same
    #: threshold and roles.
    busy_memory_s: float = 600.0
    busy_needed_s: float = 240.0
    #: A link stays narrow for so long after its last queue, and is so after so many reports under one. Less of either
    #: follows sooner, and takes a lull for a wide line or a few bad seconds for a narrow one.
    link_memory_s: float = 150.0
    link_reports: int = 15
    #: Effective requests that a distribution of lengths must rest on.
    needed_requests: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the leader sees of one model. `threshold_tokens` is the plan's; epochs are the publisher's business."""

    view: ClusterView
    model: str
    demand: DemandSnapshot | None
    profiles: Mapping[str, Profile]
    threshold_tokens: int
    link: LinkState | None = None


class HoldReason(Enum):
    """Why nothing changes."""

    INSUFFICIENT_DATA = "insufficient_data"
    WARM_UP = "warm_up"
    CONVERTING = "converting"
    DWELL = "dwell"
    HYSTERESIS = "hysteresis"
    #: Other roles are wanted, which must show for longer.
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True)
class Hold:
    reason: HoldReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The next step: to be published as a plan with these shares of all nodes concerned. `target_shares` is where the
    steps lead, `lambda_max` what the target sustains and `current_lambda_max` what there is now."""

    threshold_tokens: int
    shares: Mapping[NodeId, float]
    reason: str
    converts: tuple[Change, ...] = ()
    target_threshold_tokens: int = 0
    target_shares: tuple[float, ...] = ()
    lambda_max: float = 0.0
    current_lambda_max: float = 0.0


class Rebalancer:
    """One per leader and model. What it remembers of a cluster it learns anew after a change of leader."""

    def __init__(self, params: RebalanceParams = RebalanceParams()) -> None:
        self._params = params
        self._roster = Roster(params.convert_timeout_s)
        self._correction = Correction()
        self._watch = Watch(params.busy_memory_s)
        self._line = LineMemory(params.link_memory_s, params.link_reports)
        #: What the last rounds wanted (more prefill, less, or only another t), how many of them in a row, and what was
        #: forgone meanwhile, in seconds of all that the cluster sustains.
        self._wanted: tuple[str, int] = ("", 0)
        self._rounds, self._forgone_s = 0, 0.0
        self._considered_at: float | None = None
        self._direction, self._directed_at = 0, -math.inf

    @property
    def correction(self) -> Correction:
        return self._correction

    def see(self, observation: Observation, threshold_tokens: int, now: float) -> None:
        """What there is between two rounds, once per report, with the threshold that routing follows. Without this the
        rounds go by what is reported at their time."""
        self._watch.see(observation.view.nodes.values(), threshold_tokens, observation.demand, now)
        self._line.see(observation.link, now)

    def consider(self, observation: Observation, now: float) -> Proposal | Hold:
        """A round. What is not confirmed yet is worth another one soon."""
        elapsed_s = self._elapsed_s(now)
        observation = replace(observation, link=self._line.believed(observation.link))
        pool = self._roster.pool(observation.view, observation.model, now)
        fleet, lengths = self._fleet(observation, pool, Correction()), self._lengths(observation)
        arrivals = known(observation.demand.arrivals_per_s) if observation.demand is not None else None
        for needed in (fleet, lengths):
            if isinstance(needed, InsufficientData):
                return self._hold(HoldReason.INSUFFICIENT_DATA, f"{needed.what}: {needed.have:g} of {needed.needed:g}")
        if arrivals is None:
            return self._hold(HoldReason.INSUFFICIENT_DATA, "arrivals")
        assert isinstance(fleet, Fleet) and isinstance(lengths, Lengths)
        if not self._warm(pool, now):
            return self._hold(HoldReason.WARM_UP, "all PD nodes have just started or changed")
        self._learn(observation, pool, fleet, lengths, arrivals, now)
        corrected = self._fleet(observation, pool, self._correction)
        assert isinstance(corrected, Fleet)
        return self._propose(observation, pool, corrected, lengths, elapsed_s, now)

    def check(self) -> None:
        assert self._rounds >= 0 and self._forgone_s >= 0
        self._line.check()
        self._roster.check()

    # -- what there is

    def _elapsed_s(self, now: float) -> float:
        """Since the last round; not the hours in which another router was the leader."""
        since = now if self._considered_at is None else self._considered_at
        self._considered_at = now
        return min(max(0.0, now - since), self._params.dwell_s)

    def _warm(self, pool: Pool, now: float) -> list[Node]:
        return [node for node in pool.nodes if self._roster.tenure_s(node.id, now) >= self._params.warm_up_s]

    def _lengths(self, observation: Observation) -> Lengths | InsufficientData:
        if observation.demand is None:
            return InsufficientData("demand", 0, 1)
        return observation.demand.lengths(self._params.needed_requests)

    def _fleet(self, observation: Observation, pool: Pool, correction: Correction) -> Fleet | InsufficientData:
        params, demand, link = self._params, observation.demand, observation.link
        local = stage(list(pool.nodes), observation.profiles, None).profile
        remote = stage(_remote(observation), observation.profiles, None)
        output_tokens = known(demand.output_tokens) if demand is not None else None
        if not pool.nodes:
            return InsufficientData("PD nodes", 0, 1)
        if local is None or local.decode is None or (remote.profile is None and remote.nodes):
            return InsufficientData("profiles", 0, 1)
        if not output_tokens:
            return InsufficientData("finished requests", 0, 1)
        capacity = link.capacity_bytes_per_s if link is not None else None
        if capacity is not None and known(capacity) is None:
            return InsufficientData("link rates", 0, 1)
        return Fleet(
            n_prfaas=round(remote.nodes),
            n_pd=len(pool.nodes),
            prfaas=correction.of_remote(remote.profile or local),
            pd=correction.of_local(local),
            link_bytes_per_s=None if capacity is None else params.usable_share * capacity,
            output_tokens=output_tokens,
            step_limit_s=params.step_limit_s,
        )

    # -- what the model gets wrong

    def _learn(
        self, observation: Observation, pool: Pool, fleet: Fleet, lengths: Lengths, arrivals: float, now: float
    ) -> None:
        """Expected is what the uncorrected model says, so that the factors are those of the profiles."""
        seconds = self._watch.seconds
        if seconds is not None and seconds < self._params.busy_needed_s:
            return
        arrivals = self._watch.arrivals_per_s or arrivals
        threshold = self._watch.threshold_tokens
        threshold = observation.threshold_tokens if threshold is None else threshold
        warm = [self._watch.averaged(node) for node in self._warm(pool, now)]
        staffing = staffed(fleet, [node.share for node in pool.nodes])
        costs = CostModel.of(fleet, lengths, self._params.approximation).at(threshold)
        p, slots = costs.offloaded_share, fleet.decode.max_batch
        prefilling, decoding = [n for n in warm if n.role.prefills], [n for n in warm if n.role.decodes]
        remote = [self._watch.averaged(node) for node in _remote(observation)]
        self._correction = self._correction.towards(
            remote=StageReading(
                _ratio(arrivals * p * costs.remote_s, fleet.n_prfaas),
                mean(node.load.prefill_busy_ratio for node in remote),
                stage(remote, observation.profiles, costs.remote_tokens).backlog_s,
            ),
            prefill=StageReading(
                _ratio(arrivals * (1 - p) * costs.local_s, staffing.prefill_nodes),
                mean(node.load.prefill_busy_ratio for node in prefilling),
                stage(prefilling, observation.profiles, costs.local_tokens).backlog_s,
            ),
            decode=StageReading(
                staffing.batch_at(fleet, arrivals) / slots,
                mean(node.load.decode_busy_ratio for node in decoding if node.role is Role.DECODE),
            ),
        )

    # -- what is to change

    def _propose(
        self, observation: Observation, pool: Pool, fleet: Fleet, lengths: Lengths, elapsed_s: float, now: float
    ) -> Proposal | Hold:
        model = CostModel.of(fleet, lengths, self._params.approximation)
        target = plan(fleet, lengths, self._params.roles, self._params.approximation)
        assert isinstance(target, RolePlan)
        shares = [pool.shares[node.id] for node in pool.nodes]
        present = staffed(fleet, shares)
        kept = present.rates(fleet, model, observation.threshold_tokens)
        tuned_t, tuned = best_threshold(fleet, model, present)
        todo = changes(pool.nodes, pool.shares, wanted_shares(target), pool.stuck)
        gained, chance = gain(tuned, target.throughput), error(observation.demand)
        back = _direction(todo) == -self._direction
        if todo and gained >= max(self._params.needed_gain, (2 if back else 1) * chance):
            return self._step(
                pool, fleet, model, target, tuned, todo, gained * elapsed_s if elapsed_s > 0 else 0.0, now
            )
        if self._retunes(observation.threshold_tokens, tuned_t, kept, tuned, chance):
            if not self._agreed("threshold", 1 if tuned_t > observation.threshold_tokens else -1, 0.0):
                return Hold(HoldReason.HYSTERESIS, f"t {tuned_t} is to be confirmed")
            self._wanted = ("", 0)
            return Proposal(
                threshold_tokens=tuned_t,
                shares=pool.shares,
                reason=f"t {observation.threshold_tokens} -> {tuned_t} for the same roles",
                target_threshold_tokens=tuned_t,
                target_shares=tuple(sorted(shares, reverse=True)),
                lambda_max=tuned.lambda_max,
                current_lambda_max=kept.lambda_max,
            )
        return self._hold(HoldReason.HYSTERESIS, f"the best roles gain {gained:.1%}")

    def _step(
        self,
        pool: Pool,
        fleet: Fleet,
        model: CostModel,
        target: RolePlan,
        present: Throughput,
        todo: Sequence[Change],
        forgone_s: float,
        now: float,
    ) -> Proposal | Hold:
        """In order: confirmed by enough rounds, not back to where it came from, room for another conversion, and a
        node that has been what it is for long enough."""
        direction = _direction(todo)
        # One that goes back has cost both ways for nothing, if it is wrong.
        costs_s = self._params.change_costs * self._params.dwell_s * (2 if direction == -self._direction else 1)
        if not self._agreed("roles", direction, forgone_s) or self._forgone_s < costs_s:
            return Hold(HoldReason.UNCONFIRMED, f"{target.n_p} prefill, {target.n_d} decode is to be confirmed")
        if direction != self._direction and now - self._directed_at < self._params.dwell_s:
            return Hold(HoldReason.DWELL, "the cluster has just gone the other way")
        room = max(1, int(self._params.converting_share * len(pool.nodes))) - len(pool.converting)
        if room <= 0:
            return Hold(HoldReason.CONVERTING, ", ".join(pool.converting))
        settled = self._params.dwell_s
        free = [
            change
            for change in todo
            if self._roster.tenure_s(change.node, now) >= settled and change.node not in pool.converting
        ]
        if not free:
            return Hold(HoldReason.DWELL, "the nodes have just become what they are")
        taken = tuple(free[:room])
        shares = dict(pool.shares) | {change.node: change.after for change in taken}
        t, _ = best_threshold(fleet, model, staffed(fleet, list(shares.values())))
        self._direction, self._directed_at = direction, now
        names = ", ".join(f"{change.node} {change.before:g} -> {change.after:g}" for change in taken)
        return Proposal(
            threshold_tokens=t,
            shares=MappingProxyType(shares),
            reason=f"{names}: {present.lambda_max:.3g} -> {target.throughput.lambda_max:.3g} requests/s",
            converts=taken,
            target_threshold_tokens=target.threshold_tokens,
            target_shares=wanted_shares(target),
            lambda_max=target.throughput.lambda_max,
            current_lambda_max=present.lambda_max,
        )

    def _retunes(self, t: int, tuned_t: int, kept: Throughput, tuned: Throughput, chance: float) -> bool:
        """Both t are estimates, so that the gain from one to the other is wrong by chance twice."""
        needed = self._params.needed_threshold_gain
        return tuned_t != t and (
            gain(kept, tuned) >= max(needed, 2 * chance) or prefill_gain(kept, tuned) >= max(5 * needed, 2 * chance)
        )

    def _agreed(self, what: str, direction: int, forgone_s: float) -> bool:
        if (what, direction) != self._wanted:
            self._wanted, self._rounds, self._forgone_s = (what, direction), 0, 0.0
        self._rounds, self._forgone_s = self._rounds + 1, self._forgone_s + forgone_s
        return self._rounds >= self._params.agreeing_rounds

    def _hold(self, reason: HoldReason, detail: str) -> Hold:
        """Nothing is wanted: whoever wants something later starts from the first round."""
        self._wanted, self._rounds, self._forgone_s = ("", 0), 0, 0.0
        return Hold(reason, detail)


def wanted_shares(target: RolePlan) -> tuple[float, ...]:
    """From most to least prefill."""
    mixed = () if target.mixed is None else (target.mixed.prefill_share,)
    return (*[1.0] * target.n_p, *mixed, *[0.0] * target.n_d)


def _remote(observation: Observation) -> list[Node]:
    return [
        node
        for _, node in sorted(observation.view.nodes.items())
        if node.kind is NodeKind.PREFILL_WORKER and node.model == observation.model and not node.load.draining
    ]


def _direction(todo: Sequence[Change]) -> int:
    """Whether more is to be prefilled, or less; 0 where nothing is to change."""
    more = sum(change.after - change.before for change in todo)
    return 1 if more > 0 else -1 if todo else 0


def _ratio(asked: float, given: float) -> float:
    return asked / given if given > 0 else math.inf
