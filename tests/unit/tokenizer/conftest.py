"""One tokenizer for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.tokenizer.text import TextTokenizer, load_tokenizer
from tests.unit.tokenizer.byte_level import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(model_dir)
    yield tokenizer
    tokenizer.close()
