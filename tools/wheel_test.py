"""Builds the source distribution and, from that, the wheel; installs it alone in an environment of its own, and runs it
from a folder where no checkout is to be found.

What must hold: the wheel has all files of the two packages and nothing else, and the version that is written in
`prfaas/version.py`. Without the extra `engine`, so that nothing of it turns out to be needed: the demo runs on the cost
model.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import ZipFile

from prfaas.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("prfaas", "services")
#: All that a release is made from.
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
TIMEOUT_S = 600


def package_files(root: Path) -> set[str]:
    found = (path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}


def complaints(wheel: Path, wanted: set[str]) -> Iterator[str]:
    """What is wrong with its contents."""
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"prfaas-{VERSION}.dist-info"
        own = {name for name in names if not name.startswith(f"{info}/")}
        yield from (f"{name} is missing" for name in sorted(wanted - own))
        yield from (f"{name} does not belong there" for name in sorted(own - wanted))
        if f"{info}/licenses/LICENSE" not in names:
            yield "it has no LICENSE"
        if f"{info}/METADATA" not in names:
            yield f"it is not of version {VERSION}"


def build(scratch: Path) -> Path:
    """The wheel. Building leaves files behind, so it is done on a copy."""
    copy, dist = scratch / "source", scratch / "dist"
    dist.mkdir()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    run([sys.executable, "-c", BUILD_SDIST, str(dist)], copy)
    (sdist,) = dist.glob("*.tar.gz")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(sdist)], scratch)
    (wheel,) = dist.glob("*.whl")
    return wheel


def installed(wheel: Path, scratch: Path) -> Path:
    """The programs of a fresh environment that has the wheel and what it depends on."""
    home = scratch / "venv"
    venv.create(home, with_pip=True)
    constraints = str(ROOT / "constraints.txt")
    run([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", constraints, str(wheel)], scratch)
    return home / "bin"


def run(command: Sequence[str], folder: Path) -> str:
    """What it prints. Nothing of this checkout is in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PRFAAS_"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"wheel-test: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def smoke(programs: Path, folder: Path) -> Iterator[str]:
    """What is wrong with how it runs."""
    prfaas = str(programs / "prfaas")
    if VERSION not in (said := run([prfaas, "--version"], folder)):
        yield f"--version says {said.strip()}"
    place = run([str(programs / "python"), "-c", "import prfaas.version as v; print(v.__file__)"], folder).strip()
    if not Path(place).is_relative_to(programs.parent):
        yield f"it runs {place}"
    if json.loads(run([prfaas, "config", "dump"], folder))["router"]["port"] != 8000:
        yield "config dump has other defaults"
    shown = json.loads(run([prfaas, "demo", "--family", "cost_model", "--json"], folder).splitlines()[-1])
    if (paths := {name: each["path"] for name, each in shown.items()}) != {"short": "local", "long": "remote"}:
        yield f"the demo took the paths {paths}"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="prfaas-wheel-") as folder:
        scratch = Path(folder)
        wheel = build(scratch)
        files = package_files(ROOT)
        found = [*complaints(wheel, files)]
        print(f"built {wheel.name}: {len(files)} files, {wheel.stat().st_size:,} bytes")
        away = scratch / "away"
        away.mkdir()
        if not found:
            found = [*smoke(installed(wheel, scratch), away)]
    for complaint in found:
        print(f"wheel-test: {complaint}", file=sys.stderr)
    if not found:
        print("wheel-test: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
