"""The tiny model that `up` and `demo` build on their first run: whole, or not there."""

import os
import subprocess
import sys
import time
from pathlib import Path

LIVENESS_S = 60
CHECKOUT = Path(__file__).parents[2]


def test_a_build_that_was_interrupted_leaves_no_model(tmp_path: Path):
    """Half of one would be taken for a model by all later runs."""
    models = tmp_path / ".prfaas" / "models"
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "demo"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    try:
        deadline = time.monotonic() + LIVENESS_S
        while not (models.exists() and any(models.rglob("*.json"))):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    folder = models / "tiny-kimi-linear"
    assert not folder.exists() or (folder / "model.safetensors").exists()
