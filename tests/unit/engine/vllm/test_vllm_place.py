"""Where a worker's engine process keeps the sockets of its vLLM server."""

import os
import tempfile
import uuid
from pathlib import Path

import pytest

from prfaas.engine.vllm.process import _place

LONGEST_SOCKET_BYTES = 107


@pytest.mark.parametrize("length", [4, 48, 49, 200])
def test_a_socket_of_vllms_has_a_path_that_is_short_enough(length: int):
    """Also where temporary files are kept in a folder with a long name, as build systems and test runners have."""
    temporary = "/" + "t" * (length - 1)
    folder = Path(_place(temporary)) / f"prfaas-vllm-{next(tempfile._get_candidate_names())}"  # type: ignore[attr-defined]
    assert len(os.fsencode(folder / str(uuid.uuid4()))) <= LONGEST_SOCKET_BYTES
    assert (_place(temporary) == temporary) == (length <= 48)
