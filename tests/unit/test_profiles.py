"""Profiles by name: shipped ones, and tables in files."""

from pathlib import Path

import pytest

from prfaas.engine.cost_model import write_config
from prfaas.errors import ConfigError
from prfaas.profile import CASE_STUDY, shipped
from prfaas.profiles import load_profiles


def test_a_shipped_profile_is_named_by_model_and_hardware():
    """Under the hardware name that the workers use."""
    found = load_profiles({"ours": f"{CASE_STUDY}/h20"}, "m")
    assert found["ours"] == shipped(CASE_STUDY, "h20")


def test_a_cost_models_folder_is_a_profile_of_itself(tmp_path: Path):
    """Scaled as the model is: the same seconds and bytes that it will take."""
    write_config(tmp_path, time_scale=0.1, byte_scale=0.01)
    found = load_profiles({"sim": str(tmp_path / "config.json")}, "m")["sim"]
    assert found.prefill_s(8192) == pytest.approx(0.072, rel=0.01)
    assert found.kv_bytes(32768) == pytest.approx(701.3 * 1.048576e6 * 0.01, rel=0.05)
    assert found.decode is not None and found.decode.step_s(10) == pytest.approx(0.0016, rel=0.01)


@pytest.mark.parametrize("source", ["nobody/h20", "no-such-file.json"])
def test_what_cannot_be_found_is_an_error_of_the_configuration(source: str):
    """At the start, not when a request comes."""
    with pytest.raises(ConfigError):
        load_profiles({"x": source}, "m")


def test_a_table_that_makes_no_sense_is_named(tmp_path: Path):
    """With the hardware it was meant for."""
    path = tmp_path / "table.json"
    path.write_text('{"profile": []}')
    with pytest.raises(ConfigError, match="mine"):
        load_profiles({"mine": str(path)}, "m")
