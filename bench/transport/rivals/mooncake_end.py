"""Mooncake's transfer engine over TCP, without a metadata server:  mooncake_end.py target | source TARGET TOTAL

Four threads write batches of blocks, which is the best it does here.
"""

import json
import sys
import threading

from ends import BLOCK, POOL, Pool, batches, serve
from mooncake.engine import TransferEngine

THREADS = 4


def engine_on(pool: Pool) -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(pool.address, POOL):
        raise SystemExit("mooncake does not start")
    return engine


def source(target: str, there: int, total: int) -> None:
    pool = Pool(filled=True)
    engine, here = engine_on(pool), pool.address

    def write(offsets: list[int]) -> None:
        mine, theirs = [here + at for at in offsets], [there + at for at in offsets]
        if engine.batch_transfer_sync_write(target, mine, theirs, [BLOCK] * len(offsets)):
            raise SystemExit("mooncake does not transfer")

    def write_all() -> None:
        left, lock = batches(total), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    offsets = next(left, None)
                if offsets is None:
                    return
                write(offsets)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    write([0])
    serve(pool, "connected", write_all)


def main() -> None:
    if sys.argv[1] == "target":
        pool = Pool(filled=False)
        engine = engine_on(pool)
        serve(pool, [f"127.0.0.1:{engine.get_rpc_port()}", pool.address])
    else:
        name, there = json.loads(sys.argv[2])
        source(name, there, int(sys.argv[3]))


if __name__ == "__main__":
    main()
