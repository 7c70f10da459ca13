"""The engine process of a worker: `python -m prfaas.node.engine_process --fd N --pool-fd M --model DIR`.

Its main thread computes and nothing else does; one more thread takes commands from the socket, also while a chunk is
being computed. It ends when the node closes the socket or dies; signals to the group are the node's to answer.
"""

import argparse
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prfaas.engine.loading import load_engine
from prfaas.engine.messages import Command, Ready
from prfaas.ipc import Channel
from prfaas.node.engine_loop import EngineLoop
from prfaas.observe.logs import configure
from prfaas.process import die_with_parent, leave_signals_to_the_node

LOAD_INTERVAL_S = 0.25
#: Commands that wait between two turns; beyond it they wait in the socket.
MAX_COMMANDS = 1024

#: None: the node is gone.
Arrival = Command | None


class Inbox:
    """Commands as they arrive."""

    def __init__(self, channel: Channel[Command]) -> None:
        self._channel = channel
        self._arrivals: queue.Queue[Arrival] = queue.Queue(MAX_COMMANDS)
        threading.Thread(target=self._receive, name="commands", daemon=True).start()

    def take(self, timeout_s: float) -> Iterator[Arrival]:
        """All that is there, waiting up to `timeout_s` for the first."""
        try:
            yield self._arrivals.get(timeout=timeout_s) if timeout_s > 0 else self._arrivals.get_nowait()
            while True:
                yield self._arrivals.get_nowait()
        except queue.Empty:
            return

    def _receive(self) -> None:
        try:
            while (commands := self._channel.receive()) is not None:
                for command in commands:
                    self._arrivals.put(command)
        except ConnectionError:
            pass
        finally:
            self._arrivals.put(None)


def serve(channel: Channel[Command], loop: EngineLoop) -> None:
    """Work until the node is gone. Without work the thread sleeps, but for the report of its load."""
    inbox, busy, report_s = Inbox(channel), False, time.monotonic()
    while True:
        taken = False
        for arrival in inbox.take(0.0 if busy else report_s - time.monotonic()):
            if arrival is None:
                return
            loop.handle(arrival)
            taken = True
        fell_idle = not (still_busy := loop.turn()) and (busy or taken)
        busy = still_busy
        if fell_idle or time.monotonic() >= report_s:
            channel.send(loop.load())
            report_s = time.monotonic() + LOAD_INTERVAL_S


def main() -> None:
    args = _arguments()
    leave_signals_to_the_node()
    die_with_parent()
    configure("json")
    channel = Channel[Command](socket.socket(fileno=args.fd), Command)
    # The mapping lives as long as the process: views of it may be anywhere.
    pool = memoryview(mmap.mmap(args.pool_fd, os.fstat(args.pool_fd).st_size))
    try:
        engine = load_engine(args.model)
        channel.send(Ready(engine.info))
        serve(channel, EngineLoop(engine, pool, channel.send))
    except ConnectionError:
        pass  # the node is gone in the middle of a message


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prfaas.node.engine_process", description="The engine process of a worker.")
    parser.add_argument("--fd", type=int, required=True, help="a connected Unix socket: the node")
    parser.add_argument("--pool-fd", type=int, required=True, help="the memfd of the pool")
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
