"""The fast loop: the threshold in force, moved away from the plan's only as far and as long as something is pressed.

Each report the controller asks the pressure model whether the plan's t still fits what there is: the link as measured,
the nodes alive, the queues as they are. If it does not, t goes to the nearest value that does, or to where the worst
pressure is least. What must hold:

- A missing, stale or senseless signal never lowers t below what it was or what the plan says.
- Noise does not move t: it leaves only when a limit is passed, aims well inside of it, and comes back only when that
  has been possible for a while. Relief of the link does not wait; everything else is confirmed first.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from prfaas.cluster import LinkState
from prfaas.request import Mode
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.pressure import Pressure, PressureModel, Supply
from prfaas.scheduling.readings import is_known, known
from prfaas.scheduling.rule import RoutingParams
from prfaas.scheduling.signals import Signals

#: Thresholds that are tried, evenly spaced in the logarithm.
STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdParams:
    mode: Mode = Mode.AUTO
    #: t is never below the one nor above the other.
    t_min: int = 0
    t_force: int | None = None
    #: Share of the measured line that may be planned with. The rest is for retransmission, and for queues to shrink.
    usable_share: float = 0.95
    #: What waits on the link is to be gone after so long, besides what comes. Shorter reacts more strongly to a queue.
    link_drain_s: float = 15.0
    #: Prefill queues up to this are the ordinary ones of a loaded stage; what exceeds it is to be gone after so long.
    ordinary_backlog_s: float = 10.0
    backlog_drain_s: float = 60.0
    #: A link report older than this is missing.
    stale_s: float = 5.0
    #: When t moves, it goes to where the worst pressure is no more than this.
    aim: float = 0.9
    #: Smaller relative changes are not made.
    least_change: float = 0.1
    #: Reports that must agree before t moves for another reason than the link, and before it comes back.
    agreeing_reports: int = 3
    calm_reports: int = 8
    #: When t has to leave again within so long of having come back, it comes back only after twice as many calm reports
    #: as before, up to `most_patience` times as many: a load at the very limit does not make it swing.
    relapse_s: float = 300.0
    most_patience: int = 16
    #: Effective requests that a distribution of lengths must rest on, and how often it is looked at anew.
    needed_requests: float = 30.0
    refresh_s: float = 10.0


class ThresholdReason(Enum):
    """Why t is what it is."""

    PLAN = "plan"
    PINNED = "pinned"
    MODE = "mode"
    LINK_DOWN = "link_down"
    LINK_PRESSED = "link_pressed"
    REMOTE_PRESSED = "remote_pressed"
    LOCAL_PRESSED = "local_pressed"
    #: Moved earlier, and not yet back.
    HELD = "held"
    NO_SIGNAL = "no_signal"
    NO_MODEL = "no_model"
    INSUFFICIENT_DATA = "insufficient_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdDecision:
    """What routing follows until the next report, and what was expected of it. Pressures as in `pressure.py`, at this
    threshold; None: not known."""

    threshold_tokens: int
    mode: Mode
    reason: ThresholdReason
    plan_threshold_tokens: int
    link_use: float | None = None
    remote_use: float | None = None
    local_use: float | None = None
    egress_bytes_per_s: float | None = None
    usable_bytes_per_s: float | None = None
    short_tokens: float | None = None
    long_tokens: float | None = None
    output_tokens: float | None = None

    def applied(self, params: RoutingParams) -> RoutingParams:
        """The same routing under this threshold."""
        return replace(
            params,
            threshold_tokens=self.threshold_tokens,
            mode=self.mode,
            short_tokens=self.short_tokens,
            long_tokens=self.long_tokens,
            output_tokens=self.output_tokens,
        )


class ThresholdController:
    """One per router process and model; every process derives t from its own view."""

    def __init__(self, params: ThresholdParams = ThresholdParams()) -> None:
        self._params = params
        self._t: int | None = None
        self._plan: int | None = None
        self._moved_for = ThresholdReason.PLAN
        #: Consecutive reports that wanted to leave, and that wanted to come back.
        self._leaving, self._returning = 0, 0
        self._patience, self._returned_at = 1, -math.inf
        self._model: PressureModel | InsufficientData | None = None
        self._model_of: tuple[object, object] = (None, None)
        self._model_at = -math.inf

    def update(self, signals: Signals, now: float) -> ThresholdDecision:
        plan = self._bounded(signals.plan_threshold_tokens)
        if plan != self._plan or self._t is None:
            # A new plan is a new beginning: it was made with what has been seen meanwhile.
            self._plan = self._t = plan
            self._settle(ThresholdReason.PLAN)
        model, supply = self._model_for(signals, now), self._supply(signals)
        reason = self._moved(signals, model, supply, plan, now)
        decision = ThresholdDecision(
            threshold_tokens=self._t,
            mode=Mode.AUTO,
            reason=reason,
            plan_threshold_tokens=plan,
            usable_bytes_per_s=supply.link_bytes_per_s,
            output_tokens=known(signals.demand.output_tokens) if signals.demand is not None else None,
        )
        return _described(self._overruled(decision, signals), signals, model, supply)

    def check(self) -> None:
        assert self._t is None or self._bounded(self._t) == self._t, "t is out of its bounds"
        assert not (self._leaving and self._returning)

    def _moved(
        self,
        signals: Signals,
        model: PressureModel | InsufficientData | None,
        supply: Supply,
        plan: int,
        now: float,
    ) -> ThresholdReason:
        """Move t if it should be moved. In order: without a link report, without a model or without demand t stays,
        or rises to the plan's. Otherwise the pressure decides."""
        if not _heard(signals.link, self._params.stale_s):
            return self._stay(ThresholdReason.NO_SIGNAL, plan)
        if model is None:
            return self._stay(ThresholdReason.NO_MODEL, plan)
        arrivals = known(signals.demand.arrivals_per_s) if signals.demand is not None else None
        if isinstance(model, InsufficientData) or arrivals is None:
            return self._stay(ThresholdReason.INSUFFICIENT_DATA, plan)
        assert self._t is not None
        at = model.at(self._t, arrivals, supply)
        if at.worst > 1:
            self._leave(at, self._target(model, arrivals, supply, plan), now)
        elif self._t != plan:
            self._return(self._target(model, arrivals, supply, plan), plan, now)
        else:
            self._leaving = 0
        if self._t == plan:
            self._moved_for = ThresholdReason.PLAN
        return self._moved_for

    def _leave(self, at: Pressure, target: Pressure, now: float) -> None:
        self._returning = 0
        assert self._t is not None
        better = target.worst < at.worst * (1 - self._params.least_change / 2)
        if not better or not self._differs(target.threshold_tokens):
            self._leaving = 0
            return
        self._leaving += 1
        pressed = _most_pressed(at)
        if pressed is ThresholdReason.LINK_PRESSED or self._leaving >= self._params.agreeing_reports:
            relapsed = now - self._returned_at < self._params.relapse_s
            self._patience = min(2 * self._patience, self._params.most_patience) if relapsed else 1
            self._t = target.threshold_tokens
            self._settle(pressed)

    def _return(self, target: Pressure, plan: int, now: float) -> None:
        """Only towards the plan, and to it however small the step."""
        self._leaving = 0
        assert self._t is not None
        t = target.threshold_tokens
        nearer = min(plan, self._t) <= t <= max(plan, self._t) and (t == plan or self._differs(t))
        self._returning = self._returning + 1 if nearer and t != self._t else 0
        if self._returning >= self._patience * self._params.calm_reports:
            self._t, self._returned_at = t, now
            self._settle(ThresholdReason.HELD)

    def _target(self, model: PressureModel, arrivals: float, supply: Supply, plan: int) -> Pressure:
        """The t nearest to the plan's at which everything keeps within the aim, or else that of the least pressure."""
        tried = [model.at(t, arrivals, supply) for t in self._thresholds(model, plan)]
        fitting = [pressure for pressure in tried if pressure.worst <= self._params.aim]
        if fitting:
            return min(fitting, key=lambda pressure: _distance(pressure.threshold_tokens, plan))
        return min(tried, key=lambda pressure: (pressure.worst, _distance(pressure.threshold_tokens, plan)))

    def _thresholds(self, model: PressureModel, plan: int) -> list[int]:
        low, high = max(1.0, model.lengths.shortest_tokens), max(1.0, model.lengths.longest_tokens)
        steps = (math.ceil(low * (high / low) ** (step / STEPS)) for step in range(STEPS + 1))
        return sorted({self._bounded(t) for t in chain((0, plan), steps)})

    def _stay(self, reason: ThresholdReason, plan: int) -> ThresholdReason:
        assert self._t is not None
        self._leaving = self._returning = 0
        self._t = max(self._t, plan)
        return reason

    def _settle(self, reason: ThresholdReason) -> None:
        self._moved_for = reason
        self._leaving = self._returning = 0

    def _differs(self, t: int) -> bool:
        assert self._t is not None
        return abs(t - self._t) >= self._params.least_change * max(1, self._t)

    def _bounded(self, t: int) -> int:
        force = t if self._params.t_force is None else min(t, self._params.t_force)
        return max(self._params.t_min, force)

    def _supply(self, signals: Signals) -> Supply:
        """Less of each is left for new work where a backlog is to be worked off, but always something."""
        params, link = self._params, signals.link
        capacity = known(link.capacity_bytes_per_s) if link is not None and _heard(link, params.stale_s) else None
        if capacity is not None and link is not None:
            draining = link.queued_bytes / params.link_drain_s
            capacity = max(0.05 * capacity, params.usable_share * capacity - draining)

        def left(nodes: float, backlog_s: float | None) -> float:
            excess_s = max(0.0, (known(backlog_s) or 0.0) - params.ordinary_backlog_s)
            return (known(nodes) or 0.0) * max(0.1, 1 - excess_s / params.backlog_drain_s)

        return Supply(
            remote_nodes=left(signals.remote_nodes, signals.remote_backlog_s),
            local_nodes=left(signals.local_nodes, signals.local_backlog_s),
            link_bytes_per_s=capacity,
        )

    def _model_for(self, signals: Signals, now: float) -> PressureModel | InsufficientData | None:
        """Preparing it costs more than using it, and lengths change slowly."""
        remote, local = signals.remote_profile, signals.local_profile
        if signals.demand is None or remote is None or local is None:
            return None if signals.demand is not None else InsufficientData("demand", 0, 1)
        profiles = (remote, local)
        old = now - self._model_at >= self._params.refresh_s or self._model_of != profiles
        if old or not isinstance(self._model, PressureModel):
            lengths = signals.demand.lengths(self._params.needed_requests)
            self._model = lengths if isinstance(lengths, InsufficientData) else PressureModel.of(lengths, remote, local)
            self._model_of, self._model_at = profiles, now
        return self._model

    def _overruled(self, decision: ThresholdDecision, signals: Signals) -> ThresholdDecision:
        """In order: the mode that somebody chose, a link that is gone, a pinned threshold."""
        mode = signals.pinned_mode or self._params.mode
        if mode is not Mode.AUTO:
            return replace(decision, mode=mode, reason=ThresholdReason.MODE)
        if signals.unreachable:
            return replace(decision, mode=Mode.NEVER, reason=ThresholdReason.LINK_DOWN)
        if signals.pinned_threshold_tokens is not None:
            pinned = signals.pinned_threshold_tokens
            return replace(decision, threshold_tokens=pinned, reason=ThresholdReason.PINNED)
        return decision


def _described(
    decision: ThresholdDecision, signals: Signals, model: PressureModel | InsufficientData | None, supply: Supply
) -> ThresholdDecision:
    """With what is expected at its threshold."""
    arrivals = known(signals.demand.arrivals_per_s) if signals.demand is not None else None
    if not isinstance(model, PressureModel) or arrivals is None:
        return decision
    t = decision.threshold_tokens
    at = model.at(t, arrivals, supply)
    return replace(
        decision,
        link_use=at.link,
        remote_use=at.remote,
        local_use=at.local,
        egress_bytes_per_s=at.egress_bytes_per_s,
        short_tokens=model.short_tokens(t),
        long_tokens=model.long_tokens(t),
    )


def _heard(link: LinkState | None, stale_s: float) -> bool:
    """A report that is there, recent, and has sense in it. One that does not know the capacity is a report."""
    if link is None or not is_known(link.age_s) or link.age_s > stale_s or not is_known(link.queued_bytes):
        return False
    return link.capacity_bytes_per_s is None or is_known(link.capacity_bytes_per_s)


def _most_pressed(at: Pressure) -> ThresholdReason:
    """The link first, because its relief does not wait."""
    if at.link is not None and at.link > 1:
        return ThresholdReason.LINK_PRESSED
    return ThresholdReason.REMOTE_PRESSED if at.remote >= at.local else ThresholdReason.LOCAL_PRESSED


def _distance(t: int, plan: int) -> float:
    return abs(math.log((t + 1) / (plan + 1)))
