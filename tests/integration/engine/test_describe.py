"""A shard of the cache must take a folder for the same model as the engine that runs it does."""

import json
from pathlib import Path

import pytest

from prfaas.engine.describe import describe
from prfaas.engine.loading import load_engine
from prfaas.engine.tiny import FAMILIES, build_tiny
from prfaas.errors import ConfigError
from prfaas.node.model_description import describe_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_described_as_its_engine_describes_it(tmp_path: Path, family: str):
    """Without loading the weights; the namespace and the geometry are what pairing and placing go by."""
    build_tiny(tmp_path / "model", family)
    described, info = describe(tmp_path / "model"), load_engine(tmp_path / "model").info
    assert (described.model, described.namespace, described.layout) == (info.model, info.namespace, info.layout)


async def test_another_process_reads_the_folder(tmp_path: Path):
    build_tiny(tmp_path / "model", "cost_model")
    assert await describe_model(tmp_path / "model") == describe(tmp_path / "model")


@pytest.mark.parametrize("config", [None, {"model_type": "elephant"}, []])
async def test_a_folder_without_a_model_that_runs_is_a_setting_that_cannot_work(tmp_path: Path, config: object):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        await describe_model(tmp_path)
