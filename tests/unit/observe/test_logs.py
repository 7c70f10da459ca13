"""Log lines carry the request's ids and never its text. Each test reads the stderr of a real process."""

import json
import subprocess
import sys

import pytest

PRELUDE = """
import logging, structlog
from prfaas.observe.logs import configure, request_context
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_lines_of_a_request_carry_its_ids_and_others_do_not():
    """The ids are bound for the length of the request, also in lines of libraries that use `logging`."""
    inside, library, outside = map(
        json.loads,
        run("""
configure("json")
with request_context("r1", "t1"):
    structlog.get_logger().info("routed", path="remote")
    logging.getLogger("grpc").warning("slow %s", "peer")
structlog.get_logger().info("idle")
"""),
    )
    assert (inside["event"], inside["path"], inside["request_id"], inside["trace_id"]) == (
        "routed",
        "remote",
        "r1",
        "t1",
    )
    assert (library["event"], library["level"], library["request_id"]) == ("slow peer", "warning", "r1")
    assert "request_id" not in outside


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
