"""NIXL with UCX over TCP:  nixl_end.py target | source TARGET TOTAL

Four batches of blocks are in flight, which is the best it does here.
"""

import base64
import json
import os
import sys
import time
from typing import Any

from ends import BLOCK, POOL, Pool, batches, serve

IN_FLIGHT = 4


def agent_on(pool: Pool, name: str) -> tuple[Any, Any]:
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    return agent, agent.register_memory([(pool.address, POOL, 0, "")], "DRAM")


def source(metadata: str, there: int, total: int) -> None:
    pool = Pool(filled=True)
    agent, registered = agent_on(pool, "source")
    peer, here = agent.add_remote_agent(base64.b64decode(metadata)), pool.address
    agent.make_connection("target")

    def post(offsets: list[int]) -> Any:
        mine = agent.get_xfer_descs([(here + at, BLOCK, 0) for at in offsets], "DRAM")
        theirs = agent.get_xfer_descs([(there + at, BLOCK, 0) for at in offsets], "DRAM")
        handle = agent.initialize_xfer("WRITE", mine, theirs, peer, b"written")
        agent.transfer(handle)
        return handle

    def write_all() -> None:
        left = batches(total)
        running = [post(offsets) for offsets, _ in zip(left, range(IN_FLIGHT))]  # noqa: B905
        while running:
            for handle in list(running):
                state = agent.check_xfer_state(handle)
                if state == "ERR":
                    raise SystemExit("nixl does not transfer")
                if state == "DONE":
                    running.remove(handle)
                    agent.release_xfer_handle(handle)
                    if (offsets := next(left, None)) is not None:
                        running.append(post(offsets))
            time.sleep(0.0002)

    serve(pool, "connected", write_all)
    del registered


def main() -> None:
    if sys.argv[1] == "target":
        pool = Pool(filled=False)
        agent, registered = agent_on(pool, "target")
        serve(pool, [base64.b64encode(agent.get_agent_metadata()).decode(), pool.address])
        del registered
    else:
        name, there = json.loads(sys.argv[2])
        source(name, there, int(sys.argv[3]))


if __name__ == "__main__":
    main()
