"""Scenarios as files: what ships is sound, and what is wrong is named."""

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.profile import CASE_STUDY, shipped
from prfaas.sim.fault_plan import LinkStep, NodeDeath, StoreOutage
from prfaas.sim.hardware import HardwareTable
from prfaas.sim.run import run
from prfaas.sim.scenario import load, parse

SHIPPED = sorted((Path(__file__).parents[3] / "bench" / "scenarios").glob("*.toml"))
SMALL = """
name = "small"
duration_s = 60.0
warm_up_s = 0.0

[[fleets]]
name = "pd"
region = "b"
kind = "pd"
hardware = "h20"
nodes = 2
shares = [1.0]

[workload.arrivals]
rate_per_s = 0.2
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_sound(path):
    """Each file is a scenario of its own name, and runs."""
    scenario = load(path)
    assert scenario.name == path.stem
    assert scenario.folder == str(path.parent)
    quiet = scenario if scenario.workload.trace is not None else scenario.at_rate(0.5)
    summary = run(quiet.but(duration_s=120.0, warm_up_s=0.0)).summary
    assert summary["completed"] == summary["offered"] > 20
    assert summary["failed"] == 0


def test_faults_are_told_apart_by_their_kind(tmp_path):
    """Tables of an array, each with its own fields."""
    faults = """
[[faults]]
kind = "link"
at_s = 1.0
source = "a"
target = "b"
gbps = 3.0

[[faults]]
kind = "node"
at_s = 2.0
node = "pd-0"
down_s = 5.0

[[faults]]
kind = "store"
at_s = 3.0
for_s = 4.0
empty = true
"""
    assert load(written(tmp_path, SMALL + faults)).faults == (
        LinkStep(at_s=1.0, source="a", target="b", gbps=3.0),
        NodeDeath(at_s=2.0, node="pd-0", down_s=5.0),
        StoreOutage(at_s=3.0, for_s=4.0, empty=True),
    )


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("duration_s", "duration"), "scenario"),
        (('hardware = "h20"', 'hardwear = "h20"'), r"fleets"),
        (("nodes = 2", "nodes = 0"), r"fleets"),
        (("shares = [1.0]", "shares = [1.5]"), "fleets"),
        (("rate_per_s = 0.2", "rate_per_s = 0"), "arrivals"),
        (('region = "b"', 'region = "c"'), "scenario"),
        (("[workload.arrivals]", "[workload.arrival]"), "workload"),
        (('name = "small"', "name ="), "scenario.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, where):
    """Unknown keys, impossible values, and what is not TOML."""
    with pytest.raises(ConfigError, match=where):
        load(written(tmp_path, SMALL.replace(*change)))


def test_a_file_that_is_not_there_is_named(tmp_path):
    """As an error of the configuration."""
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ('kind = "link"\nat_s = 1.0\nsource = "a"\ntarget = "b"\ngbps = 3.0', "no link from a to b"),
        ('kind = "node"\nat_s = 1.0\nnode = "pd-7"', "no node pd-7"),
    ],
)
def test_a_fault_of_something_that_does_not_exist_is_an_error(tmp_path, fault, named):
    """It would otherwise be a study of nothing going wrong."""
    with pytest.raises(ConfigError, match=named):
        run(load(written(tmp_path, SMALL + f"\n[[faults]]\n{fault}\n")))


def test_hardware_that_does_not_ship_comes_as_a_table(tmp_path):
    """The same numbers give the same run; unknown hardware is an error."""
    tokens = (128, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
    table = HardwareTable.of(shipped(CASE_STUDY, "h20"), tokens)
    scenario = load(written(tmp_path, SMALL))
    fleet = scenario.fleets[0]
    with pytest.raises(ConfigError, match=r"hardware\.mine"):
        run(scenario.but(fleets=(type(fleet)(**{**_fields(fleet), "hardware": "mine"}),)))
    mine = scenario.but(fleets=(type(fleet)(**{**_fields(fleet), "hardware": "mine"}),), hardware={"mine": table})
    ours, theirs = run(mine).summary["ttft"]["mean"], run(scenario).summary["ttft"]["mean"]
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_tree_may_come_from_elsewhere():
    """A sweep changes values of a scenario as plain data."""
    with pytest.raises(ConfigError):
        parse({"name": "x"})


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
