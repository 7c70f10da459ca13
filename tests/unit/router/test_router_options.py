"""What `--help` says where a name alone would mislead."""

import json

import pytest
from click.testing import CliRunner

from prfaas import config
from services.cli import main


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        ("router", ("enabled", "secret-file", "index-bytes", "stale-s"), ("max-puts", "lookup-timeout-s")),
        ("prefill-worker", ("enabled", "lookup-timeout-s", "checkpoint-tokens"), ("secret", "index-bytes")),
        ("decode-worker", ("enabled", "max-puts", "lease-ttl-s"), ("secret", "stale-s")),
    ],
)
def test_the_cache_is_set_where_it_is_used(command: str, has: tuple[str, ...], lacks: tuple[str, ...]):
    """Each service has the settings of the cache that it reads, and none that would change nothing."""
    words = CliRunner().invoke(main, [command, "--help"], terminal_width=200).output.split()
    assert {f"--cache-{name}" for name in has} <= set(words)
    assert not {f"--cache-{name}" for name in lacks} & set(words)


@pytest.mark.parametrize("command", ["up", "router"])
def test_the_threshold_given_is_said_to_be_a_start(command):
    """A plan outlives the routers that made it, so that the value given may never be used: the option says what does
    hold it."""
    text = " ".join(CliRunner().invoke(main, [command, "--help"], terminal_width=200).output.split())
    option = text[text.index("--threshold-tokens") :].split(" --mode ")[0]
    assert "to start with" in option and "A plan in the store" in option and "`prfaas threshold --pin`" in option


def test_the_limits_of_the_endpoint_are_settings_as_all_others():
    """`config dump` and `config check` know every section, and the router has an option for each limit."""
    run = CliRunner()
    dumped = json.loads(run.invoke(main, ["config", "dump", "--http-max-headers", "9"]).output)
    assert dumped["http"]["max_headers"] == 9
    assert set(dumped) == {section for section, _ in config.fields()}
    refused = run.invoke(main, ["config", "check", "--http-max-headers", "1"])
    assert refused.exit_code == 2 and "http.max_headers" in refused.output
    words = set(run.invoke(main, ["router", "--help"], terminal_width=200).output.split())
    limits = [field.name for section, field in config.fields() if section == "http"]
    assert {f"--http-{name.replace('_', '-')}" for name in limits} <= words
    assert {"--workers", "--metrics-port", "--tls-cert", "--tls-key"} <= words
