"""What `--help` says where a name alone would mislead."""

import pytest
from click.testing import CliRunner

from services.cli import main


@pytest.mark.parametrize("command", ["up", "router"])
def test_the_threshold_given_is_said_to_be_a_start(command):
    """A plan outlives the routers that made it, so that the value given may never be used: the option says what does
    hold it."""
    text = " ".join(CliRunner().invoke(main, [command, "--help"], terminal_width=200).output.split())
    option = text[text.index("--threshold-tokens") :].split(" --mode ")[0]
    assert "to start with" in option and "A plan in the store" in option and "`prfaas threshold --pin`" in option
