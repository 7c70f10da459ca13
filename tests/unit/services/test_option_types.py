"""What cannot be used is refused as an option: exit code 2, the option's name, and nothing has been done."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli import main

CASE = ("plan", "--prfaas-profile", "case-study-1t/h200", "--pd-profile", "case-study-1t/h20", "--fixed-tokens", "1000")
BENCH = ("bench", "--endpoint", "http://127.0.0.1:1")
ADMIN = {"status": (), "workers": (), "threshold": (), "explain": ("id",)}


def refused(option: str, *arguments: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}'" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "",
        "ftp://x",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:http",
        "http://[::1",
        "http://a..b",
        "http://a b",
        "http://host\n",
    ],
)
def test_a_url_that_is_none(url: str):
    """And is not asked for as if it were one: of a host without `http://` nobody would find the name."""
    refused("--endpoint", "bench", "--endpoint", url)
    refused("--endpoint", "demo", "--endpoint", url)
    for command, more in ADMIN.items():
        refused("--admin", command, *more, "--admin", url, "--key", "k")


@pytest.mark.parametrize("key", ["ключ", "a\nb"])
def test_a_key_that_no_header_can_carry(key: str):
    refused("--key", "status", "--admin", "http://127.0.0.1:1", "--key", key)
    refused("--key", *BENCH, "--key", key)


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("option", ["--rate", "--duration-s", "--timeout-s", "--warm-up-s", "--precision", "--cv"])
def test_a_load_that_is_no_number(option: str, number: str):
    refused(option, *BENCH, option, number)


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("option", ["--demand-per-s", "--link-gbps", "--step-limit-ms", "--busy", "--cached-share"])
def test_a_plan_of_what_is_no_number(option: str, number: str):
    refused(option, *CASE, "--output-tokens", "9", "--demand-per-s", "1", option, number)


def test_a_token_that_no_vocabulary_has():
    refused("--high-token", *BENCH, "--high-token", "9" * 20)


def test_a_folder_without_a_model(tmp_path: Path):
    """Is named before any process is started."""
    for command in ("up", "demo"):
        done = CliRunner().invoke(main, [command, "--model", str(tmp_path)])
        assert done.exit_code == 2 and f"--model: {tmp_path} has no config.json" in done.output
