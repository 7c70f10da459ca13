"""What one test sets for its whole process is not there for the next."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls sets the logs of its process, as it does in production."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
