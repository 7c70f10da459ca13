"""Everything here needs tools that `make test-deploy` installs, and minutes: `make test` leaves it out."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.deploy)


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, Any]]:
    """What was measured, printed at the end and written to DEPLOY_JSON when that is set."""
    measured: dict[str, Any] = {}
    yield measured
    text = json.dumps(measured, indent=2)
    print(text)
    if path := os.environ.get("DEPLOY_JSON"):
        Path(path).write_text(text)
