"""Servers that spoil what they receive, on demand.

Workers start such a server with a Python that is a script: it puts the damaging connector in the place of ours.
"""

from pathlib import Path

from prfaas.engine.vllm.server import CONNECTOR
from prfaas.kvcache.layout import TensorKind

SCRIPT = """#!{python}
import os, sys

os.environ[{variable!r}] = {file!r}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), {root!r})))
words = [word.replace({ours!r}, {theirs!r}) for word in sys.argv[1:]]
os.execv(sys.executable, [sys.executable, *words])
"""
ROOT = Path(__file__).parents[2]
FILE, DAMAGING = "TEST_DAMAGE_FILE", "tests.vllm.damaging_connector"


class Damage:
    """`python` is the script."""

    def __init__(self, python: str, folder: Path) -> None:
        self._file, self.python = folder / "kind", folder / "python"
        self.none()
        text = SCRIPT.format(
            python=python, variable=FILE, file=str(self._file), root=str(ROOT), ours=CONNECTOR, theirs=DAMAGING
        )
        self.python.write_text(text)
        self.python.chmod(0o755)

    def of(self, kind: TensorKind) -> None:
        """From now on, all of this kind that a server has loaded becomes zeros."""
        self._file.write_text(kind.value)

    def none(self) -> None:
        self._file.write_text("")
