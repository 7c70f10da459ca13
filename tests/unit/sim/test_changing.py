"""Which plans count as going back."""

import pytest

from prfaas.cluster import NodeId, Plan
from prfaas.sim.studies.changing import gone_back


def plans(*prefilling: tuple[float, int]) -> list[tuple[float, Plan]]:
    """When, and how many of four nodes prefill."""
    return [
        (at_s, Plan(epoch, 1000, {NodeId(f"d{node}"): float(node < count) for node in range(4)}, f"{count} prefill"))
        for epoch, (at_s, count) in enumerate(prefilling, 1)
    ]


def test_a_plan_that_undoes_one_goes_back():
    """Each of them, with why it was made."""
    made = plans((10.0, 2), (20.0, 3), (30.0, 2), (40.0, 3))
    assert gone_back(made, [0.0]) == [{"at_s": 30.0, "reason": "2 prefill"}, {"at_s": 40.0, "reason": "3 prefill"}]


@pytest.mark.parametrize(
    ("made", "phases_s"),
    [
        (plans((10.0, 1), (20.0, 2), (30.0, 3)), [0.0]),
        (plans((10.0, 2), (20.0, 3), (30.0, 3), (40.0, 4)), [0.0]),
        (plans((10.0, 2), (20.0, 3), (130.0, 2)), [0.0, 100.0]),
        ([], [0.0]),
    ],
    ids=["further steps", "only another threshold", "another phase", "no plans"],
)
def test_what_goes_on_or_follows_a_change_does_not(made: list[tuple[float, Plan]], phases_s: list[float]):
    assert gone_back(made, phases_s) == []
