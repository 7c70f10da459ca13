"""Programs that we compare ourselves with and do not depend on, fetched once into the build folder.

Nothing is installed: Debian's packages are only unpacked, Python packages get an environment of their own. Whatever
cannot be had is missing from the table, with the reason.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HOME = Path(__file__).parents[2] / "build" / "bench-transport"
_DEBIAN = ("iperf3", "libiperf0", "libsctp1")
#: What the rivals' wheels expect on a machine.
_DEBIAN_OF_RIVALS = ("libibverbs1", "librdmacm1", "libnuma1", "libnl-3-200", "libnl-route-3-200")
#: Without their dependencies: those are gigabytes of CUDA that TCP has no use for.
_PYTHON_OF_RIVALS = (
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "nixl==1.5.1",
    "nixl-cu12==1.5.1",
    "numpy>=2,<3",
)
_LIMIT_S = 300.0


class Missing(Exception):
    """Says what cannot be had, and why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A program and the environment that it needs."""

    program: str
    environment: dict[str, str]


def iperf3() -> Fetched:
    """The one on the PATH, else Debian's."""
    if found := shutil.which("iperf3"):
        return Fetched(found, {})
    root = _once("iperf3", lambda folder: _unpack(_DEBIAN, folder))
    return Fetched(str(root / "usr/bin/iperf3"), _libraries(root))


def rivals() -> Fetched:
    """The Python that has Mooncake and NIXL."""
    root = _once("rivals", _install_rivals)
    return Fetched(str(root / "venv/bin/python"), _libraries(root))


def _install_rivals(folder: Path) -> None:
    _unpack(_DEBIAN_OF_RIVALS, folder)
    venv.create(folder / "venv", with_pip=True)
    pip: list[str | Path] = [
        folder / "venv/bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        *_PYTHON_OF_RIVALS,
    ]
    _run(pip, folder)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled, now or earlier; a failed attempt leaves none."""
    folder = _HOME / name
    done = folder / ".complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"fetching {name} into {folder}", file=sys.stderr)
        make(folder)
        done.touch()
    return folder


def _unpack(packages: tuple[str, ...], folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Missing(f"{packages[0]} is not here, nor is a Debian to fetch it from")
    if os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True, timeout=_LIMIT_S)
    _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", *packages], folder)
    for package in folder.glob("*.deb"):
        _run(["dpkg-deb", "-x", package, folder], folder)


def _run(command: list[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise Missing(f"{Path(command[0]).name} failed: {done.stderr.strip().splitlines()[-1:]}")


def _libraries(root: Path) -> dict[str, str]:
    folders = [str(folder) for kind in ("usr/lib", "lib") for folder in (root / kind).glob("*-linux-gnu")]
    return {"LD_LIBRARY_PATH": ":".join(folders)}
