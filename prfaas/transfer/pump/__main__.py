"""The pump process: `python -m prfaas.transfer.pump --fd N --pool-fd M`.

N is a Unix socket to the node, M the pool's memfd; both are inherited. The process ends with its node: when the socket
closes or when the parent dies. It holds nothing that outlives it, so that no way of ending needs care.
"""

import argparse
import contextlib
import itertools
import mmap
import os
import socket
import sys
import threading
import traceback

from prfaas.errors import ConfigError
from prfaas.ipc import Channel
from prfaas.process import die_with_parent, leave_signals_to_the_node
from prfaas.transfer import receiver, sender
from prfaas.transfer.pieces import PIECE_BYTES
from prfaas.transfer.pump import messages
from prfaas.transfer.pump.control import Control
from prfaas.transfer.pump.inbound import accept_for_ever
from prfaas.transfer.pump.plane import MAX_LANES, Plane
from prfaas.transfer.pump.sockets import listener
from prfaas.transfer.tickets import SECRET_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(prog="prfaas.transfer.pump", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket to the node")
    parser.add_argument("--pool-fd", type=int, required=True, help="memfd of the pool")
    args = parser.parse_args()
    die_with_parent()
    leave_signals_to_the_node()
    threading.excepthook = _end_with_the_thread
    node: Channel[messages.Command] = Channel(socket.socket(fileno=args.fd), messages.Command)
    code = 1
    try:
        with contextlib.suppress(ConnectionError):
            if (start := _first(node)) is not None:
                _run(start, node, args.pool_fd)
        code = 0
    except Exception:
        traceback.print_exc()
    # Lane threads may be blocked in the kernel; nothing of theirs is worth waiting for.
    sys.stderr.flush()
    os._exit(code)


def _run(start: messages.Start, node: Channel[messages.Command], pool_fd: int) -> None:
    if os.fstat(pool_fd).st_size < start.pool_bytes:
        raise ConfigError(
            "pool_bytes", f"the pool's memory has {os.fstat(pool_fd).st_size} bytes, not {start.pool_bytes}"
        )
    plane = _plane(start, memoryview(mmap.mmap(pool_fd, start.pool_bytes)))
    try:
        door = listener(start.listen_host, start.listen_port)
    except OSError as error:
        where = f"{start.listen_host}:{start.listen_port}"
        node.send(messages.CannotListen(f"cannot listen on {where}: {error.strerror or error}"))
        node.receive()  # its answer is to hang up: the node must not hear of a death instead
        return
    threading.Thread(target=accept_for_ever, args=(plane, door), name="accept", daemon=True).start()
    node.send(messages.Listening(door.getsockname()[1]))
    Control(plane, node).run()


def _plane(start: messages.Start, memory: memoryview) -> Plane:
    numbers = itertools.count(1)
    return Plane(
        start=start,
        memory=memory,
        secret=os.urandom(SECRET_BYTES),
        sender=sender.Sender(
            start.layout,
            sender.Params(
                connect_s=start.connect_s,
                no_progress_s=start.no_progress_s,
                silence_s=start.no_progress_s / 2,
                least_lanes=start.min_lanes,
                most_lanes=start.max_lanes,
                total_lanes=MAX_LANES,
                # A cipher takes a payload from one place to one place: to bring more together only pays for small ones.
                apart_bytes=PIECE_BYTES if start.integrity == "aes-gcm" else None,
                idle_s=start.lane_idle_s,
            ),
            numbers,
        ),
        receiver=receiver.Receiver(start.layout, receiver.Params(no_progress_s=start.no_progress_s)),
        numbers=numbers,
    )


def _first(node: Channel[messages.Command]) -> messages.Start | None:
    """None when the node left without a word."""
    commands = node.receive()  # however long its engine takes to load
    if not commands:
        return None
    assert len(commands) == 1, "commands before Listening"
    (start,) = commands
    assert isinstance(start, messages.Start), start
    return start


def _end_with_the_thread(failure: threading.ExceptHookArgs) -> None:
    """A thread that broke an invariant may hold a span: the pump does not go on without it."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
