"""Two drills on one cluster would be judged by each other's fault."""

import pytest
from click.testing import CliRunner

from prfaas.errors import ConfigError
from services.drill.alone import alone_on
from services.drill_cli import drill


def test_a_second_drill_is_refused_until_the_first_has_ended():
    """On the same cluster only."""
    with alone_on("http://a:1"):
        with pytest.raises(ConfigError, match="another drill is under way on http://a:1"), alone_on("http://a:1"):
            pass
        with alone_on("http://b:1"):
            pass
    with alone_on("http://a:1"):
        pass


@pytest.mark.parametrize("option", ["--before-s", "--fault-s", "--after-s"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "1e9"])
def test_times_without_an_end_are_refused_before_anything_breaks(option: str, seconds: str):
    """An end that never comes is no time to break something for."""
    told = CliRunner().invoke(drill, ["kill-decode", option, seconds, "--yes"])
    assert told.exit_code == 2 and option in told.output
