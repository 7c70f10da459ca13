"""The slow loop: who prefills and who decodes, and the threshold that goes with it.

Each round the planner is asked for the best roles under the demand seen, with the model corrected by what stages
report. The cluster goes there in steps of a few nodes, and only when it is worth it. What must hold:

- Too little data is an answer of its own: roles stay.
- Nodes that have just started or changed count as nodes, but what they report about themselves does not.
- Noise flips nothing: a change must bring a minimum gain, in several rounds, and a node stays what it has become for a
  minimum time. One step back within that time is never taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from prfaas.cluster import ClusterView, LinkState, Node, NodeId, NodeKind, Role
from prfaas.profile import Profile
from prfaas.scheduling.assignment import Change, changes
from prfaas.scheduling.correction import Correction, StageReading, mean
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.readings import known
from prfaas.scheduling.roster import Pool, Roster
from prfaas.scheduling.signals import stage
from prfaas.scheduling.staffing import best_threshold, staffed
from prfaas.scheduling.throughput import Approximation, CostModel, Fleet, Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceParams:
    roles: Roles = Roles.WHOLE
    approximation: Approximation = Approximation.INTEGRAL
    #: The longest decode step that the SLO allows.
    step_limit_s: float = 0.025
    #: Share of the measured line that may be planned with.
    usable_share: float = 0.95
    #: Relative gain in sustained requests/s that a change of roles, and one of t alone, must bring.
    needed_gain: float = 0.03
    needed_threshold_gain: float = 0.02
    #: Consecutive rounds that must want the same, and what the gains of roles that they promise must add up to: a large
    #: gain is taken soon, a small one must show for longer. More is calmer and slower.
    agreeing_rounds: int = 2
    needed_evidence: float = 0.12
    #: A node keeps its role, and the cluster its direction, for at least this long.
    dwell_s: float = 120.0
    #: Nodes that may be between two roles at once. Each is missing from both meanwhile.
    max_converting: int = 1
    #: A node that has not become what it should after this long is taken for what it is.
    convert_timeout_s: float = 600.0
    #: What a node reports is not used before it has been what it is for so long.
    warm_up_s: float = 60.0
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
        #: What the last rounds wanted (more prefill, less, or only another t), how many of them in a row.
        self._wanted: tuple[str, int] = ("", 0)
        self._rounds, self._evidence = 0, 0.0
        self._direction, self._directed_at = 0, -math.inf

    @property
    def correction(self) -> Correction:
        return self._correction

    def consider(self, observation: Observation, now: float) -> Proposal | Hold:
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
        return self._propose(observation, pool, corrected, lengths, now)

    def check(self) -> None:
        assert self._rounds >= 0 and self._evidence >= 0
        self._roster.check()

    # -- what there is

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
        warm = self._warm(pool, now)
        staffing = staffed(fleet, [node.share for node in pool.nodes])
        costs = CostModel.of(fleet, lengths, self._params.approximation).at(observation.threshold_tokens)
        p, slots = costs.offloaded_share, fleet.decode.max_batch
        prefilling, decoding = [n for n in warm if n.role.prefills], [n for n in warm if n.role.decodes]
        remote = _remote(observation)
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
        self, observation: Observation, pool: Pool, fleet: Fleet, lengths: Lengths, now: float
    ) -> Proposal | Hold:
        model = CostModel.of(fleet, lengths, self._params.approximation)
        target = plan(fleet, lengths, self._params.roles, self._params.approximation)
        assert isinstance(target, RolePlan)
        shares = [pool.shares[node.id] for node in pool.nodes]
        present = staffed(fleet, shares)
        kept = present.rates(fleet, model, observation.threshold_tokens)
        tuned_t, tuned = best_threshold(fleet, model, present)
        todo = changes(pool.nodes, pool.shares, wanted_shares(target), pool.stuck)
        gain = _gain(tuned, target.throughput)
        if todo and gain >= self._params.needed_gain:
            return self._step(pool, fleet, model, target, tuned, todo, gain, now)
        if self._retunes(observation.threshold_tokens, tuned_t, kept, tuned):
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
        return self._hold(HoldReason.HYSTERESIS, f"the best roles gain {gain:.1%}")

    def _step(
        self,
        pool: Pool,
        fleet: Fleet,
        model: CostModel,
        target: RolePlan,
        present: Throughput,
        todo: Sequence[Change],
        gain: float,
        now: float,
    ) -> Proposal | Hold:
        """In order: confirmed by enough rounds, not back to where it came from, room for another conversion, and a
        node that has been what it is for long enough."""
        more = sum(change.after - change.before for change in todo)
        direction = 1 if more > 0 else -1
        if not self._agreed("roles", direction, gain) or self._evidence < self._params.needed_evidence:
            return Hold(HoldReason.HYSTERESIS, f"{target.n_p} prefill, {target.n_d} decode is to be confirmed")
        if direction != self._direction and now - self._directed_at < self._params.dwell_s:
            return Hold(HoldReason.DWELL, "the cluster has just gone the other way")
        room = self._params.max_converting - len(pool.converting)
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

    def _retunes(self, t: int, tuned_t: int, kept: Throughput, tuned: Throughput) -> bool:
        needed = self._params.needed_threshold_gain
        gains = _gain(kept, tuned) >= needed or _prefill_rate(tuned) >= _prefill_rate(kept) * (1 + 5 * needed)
        return gains and abs(tuned_t - t) >= 0.1 * max(1, t)

    def _agreed(self, what: str, direction: int, gain: float) -> bool:
        if (what, direction) != self._wanted:
            self._wanted, self._rounds, self._evidence = (what, direction), 0, 0.0
        self._rounds, self._evidence = self._rounds + 1, self._evidence + gain
        return self._rounds >= self._params.agreeing_rounds

    def _hold(self, reason: HoldReason, detail: str) -> Hold:
        """Nothing is wanted: whoever wants something later starts from the first round."""
        self._wanted, self._rounds, self._evidence = ("", 0), 0, 0.0
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


def _gain(before: Throughput, after: Throughput) -> float:
    return after.lambda_max / before.lambda_max - 1 if before.lambda_max > 0 else math.inf


def _prefill_rate(rates: Throughput) -> float:
    """What the two ways of prefill sustain together."""
    p = rates.costs.offloaded_share
    remote, local = rates.theta_prfaas / p if p > 0 else math.inf, rates.theta_pdp / (1 - p) if p < 1 else math.inf
    return min(remote, local)


def _ratio(asked: float, given: float) -> float:
    return asked / given if given > 0 else math.inf
