"""The file of constraints is exactly what the project installs."""

from packaging.requirements import Requirement
from packaging.version import Version

from tools.check_constraints import Environment, complaints, pins, wanted

NEEDS = {"": (Requirement("web>=1"),), "dev": (Requirement("lint"),)}


def environment(**versions: str) -> Environment:
    """Where `web` needs `sockets`, and `colours` on Windows only."""
    needs = {"web": (Requirement("sockets"), Requirement('colours; sys_platform == "win32"'))}
    return Environment({name: Version(version) for name, version in versions.items()}, needs)


def told(constraints: str, here: Environment) -> list[str]:
    return [*complaints(pins(constraints), NEEDS, here)]


ALL = "web==1.2\nsockets==3.0\nlint==5\n"
HERE = environment(web="1.2", sockets="3.0", lint="5", pip="23.0")


def test_all_that_is_installed_is_pinned():
    """Also a build of the pinned version with a label of its own; pip is of the environment."""
    assert told(ALL, HERE) == []
    assert told(ALL, environment(web="1.2", sockets="3.0+cpu", lint="5")) == []


def test_what_is_not_pinned_is_told():
    """Also when only something else needs it."""
    assert told("web==1.2\nlint==5\n", HERE) == ["sockets: is installed and not pinned (add sockets==3.0)"]


def test_another_version_is_told():
    """What is installed is not what the file says."""
    assert told(ALL.replace("3.0", "2.9"), HERE) == ["sockets: 3.0 is installed, sockets==2.9 is pinned"]


def test_a_range_is_no_pin():
    """It would let another version in tomorrow."""
    assert told(ALL.replace("lint==5", "lint>=5"), HERE) == ["lint>=5: is no pin"]


def test_what_nothing_needs_is_told_where_all_is_installed():
    """Requirements of what is missing are not known, so nothing is said then."""
    more = f"{ALL}colours==1\n"
    assert told(more, HERE) == ["colours: is pinned and not needed"]
    assert told(more, environment(web="1.2", sockets="3.0")) == []


def test_an_extra_with_a_pin_of_its_own_is_left_to_it():
    """But the engine's, which pins one of what it needs."""
    text = """
[project]
dependencies = ["web"]
optional-dependencies = { engine = ["maths==1"], store = ["store==2"] }
"""
    assert {name: [str(each) for each in needs] for name, needs in wanted(text).items()} == {
        "": ["web"],
        "engine": ["maths==1"],
    }
