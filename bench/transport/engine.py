"""An engine as far as a transfer is concerned: a process that maps the pool, fills it, reads it, and may be busy.

    python -m bench.transport.engine --pool-fd N

One command a line on standard input, one line of JSON in answer: fill SEED | clear | crc OFFSET BYTES | busy | idle.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
from crc32c import crc32c


class Engine:
    """Ours to command; `prefix` is what runs a command where the engine shall live."""

    def __init__(self, pool_fd: int, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.transport.engine", "--pool-fd", str(pool_fd)],
            pass_fds=(pool_fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def fill(self, seed: int) -> None:
        """Other bytes everywhere, so that a piece in the wrong place is noticed."""
        self._ask(f"fill {seed}")

    def clear(self) -> None:
        self._ask("clear")

    def crc(self, offset: int, nbytes: int) -> int:
        return self._ask(f"crc {offset} {nbytes}")

    def busy(self) -> None:
        """From now on a thread computes, holding the interpreter as engines do."""
        self._ask("busy")

    def idle(self) -> None:
        self._ask("idle")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, command: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        answer: int = json.loads(self.process.stdout.readline())
        return answer


class _Busy(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = False
        self.start()

    def run(self) -> None:
        total = 0
        while not self.ended:
            for number in range(1000):
                total += number * number


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.transport.engine", description=__doc__)
    parser.add_argument("--pool-fd", type=int, required=True)
    pool_fd = parser.parse_args().pool_fd
    nbytes = os.fstat(pool_fd).st_size
    pool = memoryview(mmap.mmap(pool_fd, nbytes))
    busy: _Busy | None = None
    for line in sys.stdin:
        answer = 0
        match line.split():
            case ["fill", seed]:
                pool[:] = np.random.default_rng(int(seed)).bytes(nbytes)
            case ["clear"]:
                pool[:] = bytes(nbytes)
            case ["crc", offset, count]:
                answer = crc32c(pool[int(offset) : int(offset) + int(count)])
            case ["busy"]:
                busy = _Busy()
            case ["idle"] if busy is not None:
                busy.ended = True
                busy.join()
            case _:
                raise SystemExit(f"what is {line!r}?")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
