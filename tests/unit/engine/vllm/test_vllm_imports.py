"""The connector runs inside vLLM's environment, which has none of our packages and other versions of some."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
#: What an environment with vLLM surely has, besides the standard library.
THERE = ("msgspec", "torch")

CODE = f"""
import importlib, sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {{"prfaas", *{THERE!r}}}:
            raise ImportError(f"{{name}} may not be there")

sys.meta_path.insert(0, Refuse())
for module in ("books", "bridge", "compatibility", "geometry", "paging", "read_facts", "refuse", "wish"):
    importlib.import_module("prfaas.engine.vllm." + module)
from prfaas.ipc import Channel
"""


def test_its_parts_need_only_what_vllm_needs():
    """No generated code, no gRPC, no logging library of ours: whatever is imported on the way would be refused."""
    subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=60)
