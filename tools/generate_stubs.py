"""Generates the Python, gRPC and mypy stubs of every proto under `proto/` into the package; `--check` only compares.

The stubs are committed, so that installing needs no compiler; the check keeps them equal to what the protos say.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"


def protos() -> list[str]:
    return sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))


def compile_protos(*outputs: str) -> None:
    """Run the protoc of grpcio-tools; its mypy plugins live beside this interpreter."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *protos()]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(command, cwd=PROTOS, check=True, env=os.environ | {"PATH": path}, timeout=120)


def generate(into: Path) -> None:
    compile_protos(
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out=quiet:{into}",
        f"--mypy_grpc_out=quiet:{into}",
    )


def stale() -> list[str]:
    """Stubs that are missing, that differ from what their proto gives, or whose proto is gone."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {str(path.relative_to(scratch)): path.read_bytes() for path in Path(scratch).rglob("*_pb2*")}
    folders = {str(Path(proto).parent) for proto in protos()}
    found = {
        str(path.relative_to(ROOT)): path.read_bytes() for folder in folders for path in (ROOT / folder).glob("*_pb2*")
    }
    return sorted(name for name in fresh.keys() | found.keys() if fresh.get(name) != found.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a committed stub is stale; write nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    names = stale()
    for name in names:
        print(f"{name} is stale: run `make stubs`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
