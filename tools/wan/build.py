"""Small C programs of this repository, compiled on first use."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

#: Compiled programs, by the hash of their source. Not in version control; `make clean` removes it.
_BUILT = Path(__file__).parents[2] / "build" / "wan"


class Unavailable(Exception):
    """This machine cannot do what was asked; says what it lacks."""


def compiled(source: Path, *flags: str) -> Path:
    """The program of a C source file, compiled if it was not before."""
    program = _BUILT / f"{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if program.exists():
        return program
    if (compiler := shutil.which("cc")) is None:
        raise Unavailable("there is no C compiler (cc)")
    _BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILT) as scratch:
        fresh = Path(scratch, "program")
        done = subprocess.run(
            [compiler, "-O2", "-Wall", "-o", fresh, source, *flags], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unavailable(f"{source.name} does not compile: {done.stderr.strip()}")
        fresh.replace(program)
    return program
