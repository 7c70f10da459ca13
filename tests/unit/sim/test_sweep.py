"""A scenario at many settings."""

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.request import Mode
from prfaas.sim.sweep import values_of, variants

CASE_STUDY = Path(__file__).parents[3] / "bench" / "scenarios" / "prfaas_pd.toml"


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("link_gbps=10,8,6", "link_gbps", [10, 8, 6]),
        ("mode=auto,always", "mode", ["auto", "always"]),
        ("control.slow=true,false", "control.slow", [True, False]),
        ("fleets.1.shares=[1,0.5],[1]", "fleets.1.shares", [[1, 0.5], [1]]),
        ("name=a, 2", "name", ["a", 2]),
    ],
)
def test_values_are_json_or_text(text, name, values):
    assert values_of(text) == (name, values)


@pytest.mark.parametrize("text", ["link_gbps", "=1,2", "link_gbps="])
def test_what_sets_nothing_is_refused(text):
    with pytest.raises(ValueError, match="name=value"):
        values_of(text)


def test_every_combination_is_made():
    """The last name varies fastest, and each scenario is what its settings say."""
    made = variants(CASE_STUDY, [("link_gbps", [10, 4]), ("rate_per_s", [1, 2])])
    assert [tuple(settings.values()) for settings, _ in made] == [(10, 1), (10, 2), (4, 1), (4, 2)]
    for settings, scenario in made:
        assert {link.gbps for link in scenario.links} == {settings["link_gbps"]}
        assert scenario.workload.arrivals.rate_per_s == settings["rate_per_s"]


def test_a_place_in_a_list_and_a_table_not_there_yet_can_be_set():
    """By number, or all of them; and `diurnal` is made where there was none."""
    [(_, scenario)] = variants(
        CASE_STUDY,
        [("fleets.1.shares", [[1, 0.5]]), ("workload.arrivals.diurnal.amplitude", [0.5]), ("mode", ["never"])],
    )
    assert scenario.fleets[1].shares == (1.0, 0.5)
    assert scenario.workload.arrivals.diurnal.amplitude == 0.5
    assert scenario.policy.mode is Mode.NEVER


@pytest.mark.parametrize(
    "name", ["links.7.gbps", "links.x.gbps", "policy.threshold", "nothing.here", "name.of", "duration_s.x"]
)
def test_a_place_that_is_not_there_is_named(name):
    """Neither a wrong number nor a wrong key goes unnoticed."""
    with pytest.raises(ConfigError):
        variants(CASE_STUDY, [(name, [1])])


@pytest.mark.parametrize(
    "changed",
    [[("threshold_tokens", [1, 1])], [("mode", ["auto"]), ("policy.mode", ["never"])]],
)
def test_a_run_that_would_be_made_twice_is_refused(changed):
    """By the same value, or by two names of one field."""
    with pytest.raises(ConfigError, match="more than once"):
        variants(CASE_STUDY, changed)


def test_infinity_is_named_by_its_place():
    """JSON as Python reads it has it."""
    with pytest.raises(ConfigError, match=r"links\[0\]\.gbps: not a finite"):
        variants(CASE_STUDY, [values_of("link_gbps=Infinity")])


def test_a_value_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="gbps"):
        variants(CASE_STUDY, [("link_gbps", ["wide"])])
