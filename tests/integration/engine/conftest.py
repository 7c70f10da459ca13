"""One engine per family, built and loaded once for all tests of this folder."""

from pathlib import Path

import pytest

from prfaas.engine.hf import HfEngine
from prfaas.engine.loading import load_engine
from prfaas.engine.tiny import build_tiny

FAMILIES = ("kimi_linear", "qwen3_next", "qwen3_next_moe", "qwen3")


@pytest.fixture(scope="session", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    build_tiny(directory, request.param)
    return directory


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> HfEngine:
    engine = load_engine(model_dir)
    assert isinstance(engine, HfEngine)
    return engine
