"""Other libraries that move memory over TCP, on loopback: Mooncake's transfer engine and NIXL."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from bench.transport.cpu import cpu_s
from bench.transport.fetch import Fetched, Missing
from bench.transport.rate import Rate
from tools.wan.rig import Wan

_ENDS = Path(__file__).parent / "rivals"
_TOTAL_BYTES = 1 << 30


class _End:
    """One process of a rival; see rivals/ends.py."""

    def __init__(self, wan: Wan, python: Fetched, log: IO[str], name: str, *arguments: str) -> None:
        self._log = log
        self.process = subprocess.Popen(
            wan.command("a", [python.program, _ENDS / f"{name}_end.py", *arguments]),
            env=os.environ | python.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return self.answer()

    def answer(self) -> Any:
        """The libraries also write their log there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        self._log.seek(0)
        raise Missing(f"it does not run here: {self._log.read().strip().splitlines()[-1:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def rival(wan: Wan, python: Fetched, name: str) -> Rate:
    """A GiB in blocks of 1 MiB from one process's pool into the other's."""
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as ends:
        target = ends.enter_context(contextlib.closing(_End(wan, python, log, name, "target")))
        arguments = ("source", json.dumps(target.answer()), str(_TOTAL_BYTES))
        source = ends.enter_context(contextlib.closing(_End(wan, python, log, name, *arguments)))
        source.answer()
        pids = (source.process.pid, target.process.pid)
        began, began_cpu = time.monotonic(), cpu_s(pids)
        source.ask("go")
        seconds, used = time.monotonic() - began, cpu_s(pids) - began_cpu
        if source.ask("crc") != target.ask("crc"):
            raise RuntimeError(f"{name}: arrived damaged")
    return Rate(_TOTAL_BYTES / 1e9 / seconds, used / (_TOTAL_BYTES / 1e9))
