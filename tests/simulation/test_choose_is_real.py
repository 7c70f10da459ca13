"""The simulator decides by the product's `choose`: broken on purpose, it shows in every figure.

Nothing else is touched, at the one place where the simulator imports it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prfaas.cluster import ClusterView, NodeId
from prfaas.request import Matches, Mode, Request, Route
from prfaas.scheduling.routing import Choose, choose
from prfaas.scheduling.rule import RoutingParams
from prfaas.sim import policies
from prfaas.sim.case_study_runs import scenario
from prfaas.sim.result import Result
from prfaas.sim.run import run


def always_remote(
    request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
) -> Route:
    """As if the threshold were not there."""
    return choose(request, matches, view, replace(params, mode=Mode.ALWAYS), avoid)


def always_the_first(
    request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
) -> Route:
    """Of the right kind, but whatever waits there."""
    route = choose(request, matches, view, params, avoid)
    names = view.remote_prefill if route.prefill in view.remote_prefill else view.local_prefill
    return replace(route, prefill=min(names), decode=min(view.decode))


def failing(
    request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
) -> Route:
    raise ZeroDivisionError("choose")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Choose], Result]:
    """Ten minutes of the case study with this in place of `choose`."""

    def play(instead: Choose) -> Result:
        monkeypatch.setattr(policies, "choose", instead)
        return run(scenario("prfaas_pd", 2.0).but(duration_s=600.0, warm_up_s=60.0))

    return play


def test_the_threshold_is_chooses(played):
    """A `choose` that sends everything away does so to the simulated requests."""
    right, wrong = played(choose).summary, played(always_remote).summary
    assert 0.4 < right["remote_share"] < 0.6
    assert wrong["remote_share"] == 1.0
    assert wrong["egress_gbps"] > 1.2 * right["egress_gbps"]


def test_the_spreading_of_load_is_chooses(played):
    """A `choose` that always takes the first node leaves the others idle, and requests wait many times as long."""
    right, wrong = played(choose).summary, played(always_the_first).summary
    assert wrong["ttft"]["mean"] > 10 * right["ttft"]["mean"]
    assert wrong["throughput_per_s"] < 0.6 * right["throughput_per_s"]


def test_there_is_no_other_choose_to_fall_back_on(played):
    """Without one nothing is served: the run ends with its error."""
    with pytest.raises(ZeroDivisionError, match="choose"):
        played(failing)
