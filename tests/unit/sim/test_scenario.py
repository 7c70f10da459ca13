"""Scenarios as files: what ships is sound, and what is wrong is named."""

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.profile import CASE_STUDY, shipped
from prfaas.sim.blueprint import Blueprint
from prfaas.sim.fault_plan import LinkStep, NodeDeath, StoreOutage
from prfaas.sim.hardware import HardwareTable
from prfaas.sim.kernel import Kernel
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


REMOTE = """
[[fleets]]
name = "far"
region = "a"
kind = "prefill_worker"
hardware = "h200"
nodes = 1

[[links]]
source = "a"
target = "b"
gbps = 10.0
"""
FIXED = '\n[workload.outputs]\nkind = "fixed"\ntokens = {}\n'
PROMPTS = '\n[workload.prompts]\nkind = "log_normal"\n{}\n'


def test_a_remote_fleet_with_its_link_is_sound(tmp_path):
    """What the next test breaks in many ways."""
    assert len(load(written(tmp_path, SMALL + REMOTE)).links) == 1


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("rate_per_s = 0.2", "rate_per_s = inf"), r"workload\.arrivals\.rate_per_s: not a finite"),
        (("gbps = 10.0", "gbps = inf"), r"links\[0\]\.gbps: not a finite"),
        (("duration_s = 60.0", "duration_s = inf"), "duration_s: not a finite"),
        (("duration_s = 60.0", "duration_s = 60.0\nhop_s = inf"), "hop_s: not a finite"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2" + PROMPTS.format("mu = nan")), r"prompts\.mu: not a finite"),
        (("duration_s = 60.0", "duration_s = 60.0\nreport_s = 1e-9"), "report_s"),
        (("duration_s = 60.0", "duration_s = 60.0\nsample_s = 1e-7"), "sample_s"),
        (("duration_s = 60.0", "duration_s = 1e6\nsample_s = 0.01"), "sample_s: 1e.08 samples"),
        (("duration_s = 60.0", "duration_s = 1e6\nreport_s = 0.01"), "report_s: .* reports"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2\ncv = 1e4"), r"arrivals\.cv"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2\ncv = 1e-200"), r"arrivals\.cv"),
        (("rate_per_s = 0.2", "rate_per_s = 1e6"), r"arrivals\.rate_per_s"),
        (("rate_per_s = 0.2", "rate_per_s = 9e4\nchanges = [{ at_s = 5, factor = 100 }]"), "requests, more than"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2\ndiurnal = { amplitude = 0.5, period_s = 1e-9 }"), "period_s"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2" + PROMPTS.format("low_tokens = 9\nhigh_tokens = 8")), "low_tokens"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2" + PROMPTS.format("mu = 50.0")), "no length from"),
        (("rate_per_s = 0.2", "rate_per_s = 0.2" + FIXED.format(1 << 18)), "outputs: 262144 tokens do not fit"),
        (("shares = [1.0]", "shares = [1.0, 1.0]"), "none of the PD nodes in b decodes"),
        (("shares = [1.0]", "shares = [1.0, 0.0, 0.0]"), r"fleets\[0\]: shares: 3 of 2 nodes"),
        (('hardware = "h200"', 'hardware = "h200"\nshares = [1.0]'), r"shares: a prefill worker has none"),
        (('source = "a"', 'source = "x"'), "nothing is in region x"),
        (('source = "a"', 'source = "b"'), "a link from b to itself"),
        (('source = "a"\ntarget = "b"', 'source = "b"\ntarget = "a"'), "none from a, where far is, to b"),
        (("gbps = 10.0", 'gbps = 1.0\n[[links]]\nsource = "a"\ntarget = "b"\ngbps = 2.0'), "a second link"),
        (("gbps = 10.0", "gbps = 10.0\n[policy]\nt_min = 2\nt_force = 1"), "policy: t_min: 2 is above t_force, 1"),
    ],
)
def test_what_makes_no_sense_or_no_end_is_refused(tmp_path, change, where):
    """By the path of what is wrong, before anything is simulated."""
    text = SMALL.replace("[workload.arrivals]", REMOTE + "[workload.arrivals]")
    assert change[0] in text
    with pytest.raises(ConfigError, match=where):
        load(written(tmp_path, text.replace(*change)))


@pytest.mark.parametrize(
    "line", ["length_changes = [{ at_s = 1.0, factor = 2.0 }]", 'prompts = { kind = "fixed", tokens = 5 }']
)
def test_a_trace_is_not_drawn(tmp_path, line):
    """So nothing of what describes drawn requests goes unheard."""
    trace = f'[workload]\n{line}\ntrace = {{ path = "x", format = "azure" }}\n'
    with pytest.raises(ConfigError, match=f"`{line.split()[0]}` is for requests that are drawn"):
        load(written(tmp_path, SMALL.partition("[workload.arrivals]")[0] + trace))


def test_pd_nodes_that_decode_need_hardware_that_does(tmp_path):
    """A node that only prefills does not, until a slow loop may make it decode."""
    text = SMALL.replace('hardware = "h20"', 'hardware = "h200"')
    with pytest.raises(ConfigError, match="h200 has no profile of decode"):
        run(load(written(tmp_path, text)))


def test_each_link_has_its_own_delay(tmp_path):
    """Both for KV and for messages, whatever the slowest link is."""
    slow = '[[links]]\nsource = "c"\ntarget = "b"\ngbps = 10.0\nrtt_s = 2.0\n'
    other = REMOTE.partition("[[links]]")[0].replace('"far"', '"farther"').replace('"a"', '"c"')
    cluster = Blueprint(load(written(tmp_path, SMALL + REMOTE + other + slow))).cluster(Kernel("x"))
    hops = {name: cluster.hop_s(worker) for name, worker in cluster.workers.items()}
    assert hops == {"pd-0": 0.0005, "pd-1": 0.0005, "far-0": 0.01, "farther-0": 1.0}
    assert cluster.network.between_s("a", "b") == 0.01 and cluster.network.between_s("b", "c") == 1.0


def test_a_file_that_is_not_there_is_named(tmp_path):
    """As an error of the configuration."""
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ('kind = "link"\nat_s = 1.0\nsource = "a"\ntarget = "b"\ngbps = 3.0', "no link from a to b"),
        ('kind = "node"\nat_s = 1.0\nnode = "pd-7"', "no node pd-7"),
        ('kind = "freeze"\nat_s = 1.0\nnode = "pd-7"\nfor_s = 1.0', "no node pd-7"),
        ('kind = "leader"\nat_s = 1.0\nrouter = 7\nstale_s = 1.0', "no router 7"),
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
