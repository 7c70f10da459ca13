"""What is read out of a view for the fast loop."""

from dataclasses import replace

import pytest

from prfaas.cluster import LinkState, NodeId, NodeLoad, RegionId, Role
from prfaas.profile import GBPS
from prfaas.request import Mode
from prfaas.scheduling.signals import is_silent, read, stage
from tests.unit.scheduling.steering_scenes import FAR, NEAR, PROFILES, case_study, demand, link, node, view_of

LINKS = {(FAR, NEAR): link(100)}


def test_the_sides_are_counted_with_their_backlogs():
    """Seconds in front of the average node, by what the prompts there are like."""
    loads = {name: NodeLoad(queued_prefill_tokens=90_000) for name in ("p0", "p1", "d0")}
    seen = demand(1.0)
    found = read(
        case_study(3, 5, loads=loads), "m", NEAR, PROFILES, LINKS, seen, 19_400, short_tokens=10_000, long_tokens=45_000
    )
    assert (found.remote_nodes, found.local_nodes) == (4.0, 3.0)
    assert (found.remote_profile, found.local_profile) == (PROFILES["h200"], PROFILES["h20"])
    assert found.remote_backlog_s == pytest.approx(180_000 / 45_000 * PROFILES["h200"].prefill_s(45_000) / 4)
    assert found.local_backlog_s == pytest.approx(90_000 / 10_000 * PROFILES["h20"].prefill_s(10_000) / 3)
    assert (found.link, found.demand, found.plan_threshold_tokens) == (LINKS[FAR, NEAR], seen, 19_400)


def test_a_mixed_node_counts_for_its_share():
    assert stage([node("d0", Role.MIXED, share=0.25), node("d1", Role.PREFILL)], PROFILES, None).nodes == 1.25


def test_hardware_is_added_up_by_its_speed():
    """One slow node among fast ones counts less than one; what has no profile counts nothing."""
    nodes = [
        replace(node(f"p{i}", Role.PREFILL, far=True), hardware=kind) for i, kind in enumerate(("h200",) * 2 + ("h20",))
    ]
    found = stage(nodes, PROFILES, None)
    assert found.profile is PROFILES["h200"] and 2.3 < found.nodes < 2.5
    unknown = stage([replace(nodes[0], hardware="?")], PROFILES, None)
    assert (unknown.profile, unknown.nodes, unknown.backlog_s) == (None, 1.0, None)
    assert stage([], PROFILES, None).nodes == 0.0


def test_other_models_are_not_counted():
    view = view_of(node("p0", Role.PREFILL, far=True), replace(node("p1", Role.PREFILL, far=True), model="other"))
    assert read(view, "m", NEAR, PROFILES, LINKS, None, 1).remote_nodes == 1.0


def test_of_several_links_the_tightest_counts():
    """One that nothing is known of is the tightest of all."""
    other = RegionId("other")
    view = view_of(node("p0", Role.PREFILL, far=True), replace(node("p1", Role.PREFILL, far=True), region=other))
    full = LinkState(other, NEAR, capacity_bytes_per_s=GBPS, utilization=0.9)
    assert read(view, "m", NEAR, PROFILES, {**LINKS, (other, NEAR): full}, None, 1).link is full
    assert read(view, "m", NEAR, PROFILES, LINKS, None, 1).link is None


def test_what_an_operator_pins_is_passed_on():
    found = read(
        case_study(3, 5), "m", NEAR, PROFILES, LINKS, None, 1, pinned_mode=Mode.NEVER, pinned_threshold_tokens=9
    )
    assert (found.pinned_mode, found.pinned_threshold_tokens) == (Mode.NEVER, 9)


def test_silence_there_and_reports_here_mean_that_the_link_is_gone():
    """When nobody is heard of it is the store."""
    far, near = [NodeId("p0"), NodeId("p1")], [NodeId("d0")]
    assert is_silent(far, near, {"p0": 1.0, "d0": 9.0}.get, after=5.0)  # type: ignore[arg-type]
    assert not is_silent(far, near, {"p0": 1.0, "p1": 8.0, "d0": 9.0}.get, after=5.0)  # type: ignore[arg-type]
    assert not is_silent(far, near, {"p0": 1.0, "d0": 2.0}.get, after=5.0)  # type: ignore[arg-type]
    assert not is_silent([], near, {"d0": 9.0}.get, after=5.0)  # type: ignore[arg-type]
