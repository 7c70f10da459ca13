"""What the soak tests measured: one table at the end, and as JSON where it is asked for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Measured = Callable[..., None]
FIGURES = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", metavar="FILE", help="write the figures of the soak tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Call it with what the test has found out."""

    def note(**figures: float) -> None:
        request.config.stash[FIGURES].setdefault(request.node.name, {}).update(figures)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tests = config.stash[FIGURES]
    width = max((len(name) for figures in tests.values() for name in figures), default=0)
    for test, figures in tests.items():
        terminalreporter.write_line(test)
        for name, value in figures.items():
            terminalreporter.write_line(f"  {name:{width}}  {value:,.3f}".rstrip("0").rstrip("."))
    if path := config.getoption("json"):
        Path(path).write_text(json.dumps(tests, indent=2) + "\n")
