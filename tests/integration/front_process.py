"""The router under test as a process of its own, so that its memory can be looked at:
`python front_process.py MODEL_DIR LIMITS` prints its port, and ends with its standard input. `LIMITS` is JSON.
"""

import sys
from pathlib import Path

import msgspec
import uvloop

from prfaas.process import raise_open_files
from prfaas.tokenizer.text import load_tokenizer
from services.router.http.limits import Limits
from services.router.memory import return_large_pieces
from tests.integration.router_under_test import running_router


def main() -> None:
    raise_open_files()
    return_large_pieces()
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    with running_router(uvloop.new_event_loop, load_tokenizer(Path(sys.argv[1])), limits) as router:
        sys.stdout.write(f"{router.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
