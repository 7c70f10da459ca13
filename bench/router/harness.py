"""The harness with the other routers: a folder beside this repository, found by its path.

It brings the mock worker of the others, the load generator, and how each of them is started. Its `bench.py` runs all
targets in turn and writes every run's figures into a file; ours it learns of by a module `pytargets` on its path.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Of each target of the harness, what has to be installed: a folder of the peers, or a program.
PEERS = {"direct": "", "nginx": "/usr/sbin/nginx", "vllm-rr": "vllmr", "vllm-pd": "vllmr"} | {
    "sglang-rr": "sgl",
    "sglang-pd": "sgl",
}
#: How long requests and streams are measured in each run, besides what starts and ends them.
REQUESTS_S, STREAMS_S = 2.0, 3.0
FILES = ("bench.py", "targets.py", "src/mock.c", "src/lg.c", "setup-peers.sh")


@dataclass(frozen=True, slots=True)
class Harness:
    folder: Path
    peers: Path
    build: Path

    def missing(self) -> str | None:
        """Why it cannot be used."""
        for name in FILES:
            if not (self.folder / name).is_file():
                return f"no harness at {self.folder} ({name} is not there): give its folder with --harness"
        return None if shutil.which("cc") else "there is no C compiler (cc)"

    def absent(self, targets: Iterable[str]) -> dict[str, str]:
        """Which of these targets cannot be measured, and why."""
        found = {}
        for target in targets:
            needs = PEERS[target]
            if needs.startswith("/") and not Path(needs).exists():
                found[target] = f"{needs} is not installed"
            elif needs and not needs.startswith("/") and not (self.peers / needs / "bin" / "python").exists():
                found[target] = f"nothing is in {self.peers / needs}: install the peers with --install-peers"
        return found

    def install_peers(self) -> None:
        """Those of the harness's list that are compared with here, in the versions that it names."""
        for name, packages in wanted_packages((self.folder / "setup-peers.sh").read_text()).items():
            folder = self.peers / name
            if not (folder / "bin" / "pip").exists():
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)

    def load_generator(self) -> Path:
        """Compiled when it is older than its source, as the harness does."""
        source, binary = self.folder / "src" / "lg.c", self.build / "bin" / "lg"
        if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
            binary.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cc", "-O2", "-w", "-o", str(binary), str(source)], check=True)
        return binary

    def long_prompt(self) -> str:
        """The user's message of its long scenarios."""
        spec = importlib.util.spec_from_file_location("harness_bench", self.folder / "bench.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        bodies = self.build / "bodies"
        bodies.mkdir(parents=True, exist_ok=True)
        content: str = json.loads(Path(module.bodies(str(bodies))["long"]).read_text())["messages"][0]["content"]
        return content

    def run(
        self,
        targets: Sequence[str],
        scenarios: Sequence[str],
        repeats: int,
        own: Mapping[str, Mapping[str, Any]],
        quiet_wait_s: float,
    ) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """By scenario and target, one entry for each run. Each round runs every target once."""
        plugin, out = self.build / "harness", self.build / "harness" / "results.json"
        plugin.mkdir(parents=True, exist_ok=True)
        (plugin / "pytargets.py").write_text(f"TARGETS = {dict(own)!r}\n")
        out.unlink(missing_ok=True)
        command = [sys.executable, str(self.folder / "bench.py"), "--out", str(out), "--repeats", str(repeats)]
        command += ["--targets", ",".join(targets), "--scenarios", ",".join(scenarios)]
        command += ["-d", str(REQUESTS_S), "-D", str(STREAMS_S)]
        command += ["--quiet-wait", str(quiet_wait_s), "--tries", "1", "--lock", str(self.build / "lock")]
        environment = {**os.environ, "PEERS": str(self.peers), "PYTHONPATH": str(plugin)}
        environment["BENCH_BIN"] = str(self.build / "bin")
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(out.read_text())
        return found


def wanted_packages(script: str) -> dict[str, list[str]]:
    """From the harness's list of peers, `mk FOLDER PACKAGE...` each, those that are compared with."""
    wanted = set(filter(None, PEERS.values()))
    lines = re.findall(r"^mk (\S+) (.+)$", script, re.MULTILINE)
    return {name: shlex.split(packages) for name, packages in lines if name in wanted}
