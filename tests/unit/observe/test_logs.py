"""Log lines have one form, whoever writes them, and never the text of a request. Each test reads the stderr of a real
process."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

PRELUDE = """
import logging, structlog
from prfaas.observe.logs import configure
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_lines_of_libraries_take_the_same_form():
    """With event, level and the time in UTC, which a machine can read."""
    own, library = map(
        json.loads,
        run("""
configure("json")
structlog.get_logger().info("routed", path="remote", request_id="r1")
logging.getLogger("grpc").warning("slow %s", "peer")
"""),
    )
    assert (own["event"], own["level"], own["path"], own["request_id"]) == ("routed", "info", "remote", "r1")
    assert (library["event"], library["level"]) == ("slow peer", "warning")
    for line in (own, library):
        written = datetime.fromisoformat(line["timestamp"])
        assert written.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - written) < timedelta(minutes=1)


def test_prompt_text_and_secrets_never_reach_a_line():
    """Whoever passes them: private fields are masked, bytes become a length."""
    (line,) = run("""
configure("json")
structlog.get_logger().info("got", prompt="my diary", api_key="sk-1", body=b"my diary", tokens=3)
""")
    assert "diary" not in line
    assert "sk-1" not in line
    assert json.loads(line)["body"] == "<8 bytes>"
    assert json.loads(line)["tokens"] == 3


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_traceback_does_not_show_what_variables_held(log_format: str):
    """Prompts and keys are in the variables of most functions that can fail."""
    lines = run(f"""
configure({log_format!r})
def fail(prompt):
    raise ValueError("no")
try:
    fail("my " + "diary")
except ValueError:
    structlog.get_logger().exception("failed")
""")
    assert "ValueError: no" in "\n".join(lines)
    assert "my diary" not in "\n".join(lines)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_level_filters_and_errors_keep_their_traceback(log_format: str):
    """Below the level nothing is written; an exception comes with its traceback."""
    lines = run(f"""
configure("{log_format}", "warning")
structlog.get_logger().info("quiet")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("loud")
""")
    text = "\n".join(lines)
    assert "quiet" not in text
    assert "loud" in text
    assert "ZeroDivisionError" in text
    assert (len(lines) == 1) == (log_format == "json")
