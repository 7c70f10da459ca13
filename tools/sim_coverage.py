"""How much of the scheduler the simulator runs: `prfaas sim run` alone, on shipped scenarios, with no test about.

Fails when that is less than WANTED per cent of the statements of `prfaas.scheduling` and `prfaas.flows` together. It is
how we see that the simulator plays the product's code and not a copy of it. What is left is named line by line.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from coverage import Coverage

WANTED = 85.0
PACKAGES = ["prfaas.scheduling", "prfaas.flows"]
ROOT = Path(__file__).resolve().parent.parent
#: Between them they have both loops, prefix caches, narrow and wide lines, and every kind of fault.
SCENARIOS = ("stormy.toml", "abundant.toml")


def play(scenario: Path, data: Path) -> None:
    """Run the command in a process of its own. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "coverage", "run", "--parallel-mode", f"--source={','.join(PACKAGES)}"]
    environment = os.environ | {"COVERAGE_FILE": str(data), "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "-m", "services.cli", "sim", "run", str(scenario)], cwd=ROOT, env=environment, check=True)


def measured(scenarios: Sequence[Path]) -> float:
    """Per cent of the statements that these runs reach together; prints what they do not."""
    with TemporaryDirectory() as folder:
        data = Path(folder) / "coverage"
        for scenario in scenarios:
            play(scenario, data)
        coverage = Coverage(data_file=str(data), source=PACKAGES, config_file=False)
        coverage.combine()
        return coverage.report(show_missing=True, skip_covered=True)


def main() -> None:
    os.chdir(ROOT)
    reached = measured([ROOT / "bench" / "scenarios" / name for name in SCENARIOS])
    print(f"`sim run` reaches {reached:.1f} % of {' and '.join(PACKAGES)}; wanted: {WANTED:g} %")
    if reached < WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
