"""What `prfaas up` leaves on this machine for `prfaas drill`: where its cluster is, what runs in it, and how to reach
the switches of its line and its store. Only its owner can read it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prfaas.errors import ConfigError
from services.drill.processes import Process, alive

FOLDER = Path(".prfaas") / "clusters"


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """`control` is the switch of the store, with the token that it asks for; empty where the store is an etcd. `relay`
    is that of the line between the regions; empty where there is none."""

    cluster: str
    launcher: Process
    endpoint: str
    model: str
    processes: Mapping[str, Process]
    metrics: Mapping[str, str]
    control: str = ""
    token: str = ""
    relay: str = ""

    def workers(self, kind: str) -> list[str]:
        """Names of the processes of a kind, `prefill` or `decode`, that are still those that were written down."""
        names = (name for name in self.processes if name.startswith(f"{kind}-"))
        return sorted(name for name in names if alive(self.processes[name]))


def write(file: ClusterFile, folder: Path = FOLDER) -> Path:
    """Its path. What was there before is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    path = folder / f"{file.launcher.pid}.json"
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(file))
    fresh.replace(path)
    return path


def read(path: Path) -> ClusterFile:
    """Raises ConfigError when it is none, or its cluster is gone."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ClusterFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("--cluster-file", f"{path}: {error}") from error
    if not alive(file.launcher):
        raise ConfigError("--cluster-file", f"the cluster of {path} does not run any more")
    return file


def _clear(folder: Path) -> None:
    """Of what launchers that were killed have left."""
    for path in folder.glob("*.json"):
        try:
            if not alive(msgspec.json.decode(path.read_bytes(), type=ClusterFile).launcher):
                path.unlink(missing_ok=True)
        except (OSError, msgspec.MsgspecError):
            continue


def find(folder: Path = FOLDER) -> ClusterFile | None:
    """The cluster that was started here last and still runs."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read(path))
        except ConfigError:
            continue
    return max(found, key=lambda one: one.launcher.began, default=None)
