"""A model whose workers have left is away, and not unknown."""

from dataclasses import replace

from prfaas.cluster import ClusterView
from prfaas.scheduling.routing import RoutingParams
from tests.unit.router.backends import backend_on
from tests.unit.scheduling.steering_scenes import case_study


def test_a_model_that_left_is_remembered_until_it_comes_back():
    """Other models are still served, so that the view alone cannot tell it from a wrong name."""
    both, one = two_models(), case_study(1, 1)
    views = [both]
    backend = backend_on(lambda: views[-1], RoutingParams(1000))

    def served() -> list[str]:
        return [card.id for card in backend.models()]

    assert (served(), backend.was_served("never")) == (["m", "other"], False)
    views.append(one)
    assert (served(), backend.was_served("other"), backend.was_served("never")) == (["m"], True, False)
    views.append(both)
    assert served() == ["m", "other"]


def two_models() -> ClusterView:
    view = case_study(1, 2)
    last = view.decode[-1]
    return replace(view, nodes=view.nodes | {last: replace(view.nodes[last], model="other")})
