"""Whether `constraints.txt` says exactly what is installed: every distribution that the project needs is pinned at the
version that is there, and nothing else is. So the file is a bill of materials as well.

What an extra needs is only known where it is installed. Where some are not (`openapi` comes with its own make target),
pins that might be theirs are left alone.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
#: Of the environment itself, and us.
UNPINNED = frozenset({"pip", "wheel", "prfaas"})


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed: versions and requirements by canonical name."""

    versions: Mapping[str, Version]
    requires: Mapping[str, tuple[Requirement, ...]] = field(default_factory=dict)


def installed() -> Environment:
    found = {canonicalize_name(each.metadata["Name"]): each for each in metadata.distributions()}
    return Environment(
        {name: Version(each.version) for name, each in found.items()},
        {name: tuple(map(Requirement, each.requires or ())) for name, each in found.items()},
    )


def pins(text: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {canonicalize_name(each.name): each for each in parsed}


def wanted(pyproject: str) -> dict[str, tuple[Requirement, ...]]:
    """By extra, with `""` for what is always needed. An extra that is pinned in pyproject.toml itself is left out."""
    project = tomllib.loads(pyproject)["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        name: tuple(map(Requirement, needs))
        for name, needs in extras.items()
        if name == "engine" or not all("==" in need for need in needs)
    }


def complaints(
    pinned: Mapping[str, Requirement], needs: Mapping[str, Iterable[Requirement]], here: Environment
) -> Iterator[str]:
    for pin in pinned.values():
        if len(pin.specifier) != 1 or next(iter(pin.specifier)).operator != "==":
            yield f"{pin}: is no pin"
    for name, version in sorted(here.versions.items()):
        # A build such as 2.13.0+cpu is of the version that is pinned.
        if name in pinned and not pinned[name].specifier.contains(version, prereleases=True):
            yield f"{name}: {version} is installed, {pinned[name]} is pinned"
    needed, missing = _closure([need for each in needs.values() for need in each], here)
    for name in sorted((needed & here.versions.keys()) - pinned.keys() - UNPINNED):
        yield f"{name}: is installed and not pinned (add {name}=={here.versions[name]})"
    if not missing:
        for name in sorted(pinned.keys() - needed):
            yield f"{name}: is pinned and not needed"


def _closure(needs: Iterable[Requirement], here: Environment) -> tuple[set[str], set[str]]:
    """Names of all that is needed, and of what of it is not installed."""
    needed: set[str] = set()
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(need, "") for need in needs]
    while waiting:
        need, extra = waiting.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(need.name)
        needed.add(name)
        if name not in here.versions:
            missing.add(name)
        for asked in ("", *need.extras):
            if (name, asked) not in seen:
                seen.add((name, asked))
                waiting += [(each, asked) for each in here.requires.get(name, ())]
    return needed, missing


def main() -> int:
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    needs = wanted((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = [*complaints(pinned, needs, installed())]
    for complaint in found:
        print(f"constraints.txt: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
