"""Which errors of a client the faults explain, and which they do not."""

import pytest

from tests.chaos.presence import GRACE_S, Presence

SOON = GRACE_S / 2
LATER = 3 * GRACE_S
AWAY, UNKNOWN = "its routers were away", "its routers could know of no PD node that was there"


class Told:
    """What happens to two routers and two PD nodes, one thing after the other."""

    def __init__(self) -> None:
        self.now = 100.0
        self.presence = Presence(["r0", "r1"], ["d0", "d1"])

    def gone(self, *names: str) -> "Told":
        for name in names:
            self.presence.store_gone() if name == "store" else self.presence.gone(name)
        return self

    def back(self, *names: str) -> "Told":
        for name in names:
            self.presence.store_back(self.now) if name == "store" else self.presence.back(name, self.now)
        return self

    def passed(self, seconds: float) -> "Told":
        self.now += seconds
        self.presence.look(self.now)
        return self

    def why(self, *routers: str) -> str | None:
        return self.presence.explanation(routers, self.now)


def test_who_is_away_explains_errors_until_a_little_after_its_return():
    """Of routers all that were asked, of PD nodes all that there are."""
    assert Told().gone("r0").why("r0") == AWAY
    assert Told().gone("r0").why("r0", "r1") is None
    assert Told().gone("d0", "d1").why("r0") == UNKNOWN
    assert Told().gone("d0").why("r0", "r1") is None
    assert Told().gone("r0", "d0", "d1").back("r0", "d0", "d1").passed(SOON).why("r0") == AWAY
    assert Told().gone("r0", "d0", "d1").back("r0", "d0", "d1").passed(LATER).passed(LATER).why("r0") is None


@pytest.mark.parametrize("obstacle", ["store", "r0"])
def test_a_node_that_is_back_is_unknown_until_its_router_can_have_heard_of_it(obstacle: str):
    """While the store is away, or while the router stands still, it is as if the node were not there: for that router,
    and the other one is no better off without a store."""
    told = Told().gone("d0", "d1", obstacle).passed(LATER).back("d0", "d1").passed(LATER).passed(LATER)
    assert told.why("r0") == (UNKNOWN if obstacle == "store" else AWAY)
    assert told.why("r1") == (UNKNOWN if obstacle == "store" else None)
    told.back(obstacle).passed(SOON)
    assert told.why("r0") is not None
    told.passed(LATER).passed(LATER)
    assert told.why("r0") is None


def test_a_router_that_stood_still_whenever_the_store_was_there_has_heard_nothing():
    """Neither of the two was away when the client asked, but they never were there at one time since the node is."""
    told = Told().gone("d0", "d1", "store", "r1").passed(LATER).back("d0", "d1").gone("r0").back("store")
    told.passed(LATER).gone("store").back("r0").passed(LATER)
    assert told.why("r0") == UNKNOWN
    assert told.why("r1", "r0") == UNKNOWN, "one was away, the other knew of nobody"
    told.back("store").passed(LATER).passed(LATER)
    assert told.why("r0") is None


def test_one_node_that_is_known_is_enough_to_be_served():
    assert Told().gone("d0", "store").passed(LATER).back("d0").passed(LATER).why("r0") is None
