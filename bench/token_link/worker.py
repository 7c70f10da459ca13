"""The worker's side of the measurement, a process of its own: it answers at once, and emits tokens at a pace.

    python -m bench.token_link.worker [CERTIFICATES]

Prints a JSON line with its pid and the ports of both adapters, and ends with its standard input.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop

from bench.token_link.plan import LIFE, WORKER, identity
from prfaas.cluster import Namespace, WireRange
from prfaas.node.link_server import Emit, serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.request import AttemptId, FinishReason
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Done,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)
from prfaas.security import PeerRole

#: One token, as an engine gives it.
TOKEN = b"\x01\x02\x03\x04"


class Session:
    """A prompt's first token id is how many tokens it gets, its second how many milliseconds lie between two, its third
    how many before the first: 0 is all at once."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._loop = emit, asyncio.get_running_loop()
        self._prompts: dict[AttemptId, bytes] = {}

    def handle(self, attempt: AttemptId, command: Command) -> None:
        match command:
            case Reserve():
                self._prompts[attempt] = command.prompt
                self._emit(attempt, Reserved(kv_address="127.0.0.1:1", generation=1, incarnation=LIFE))
            case Prefill():
                done = PrefillDone(queue_s=0.0, compute_s=0.001, exposed_s=0.0, prefill_tokens=63, kv_bytes=0)
                self._emit(attempt, done)
            case Decode():
                prompt = self._prompts.pop(attempt)
                tokens, gap_ms, first_ms = (int.from_bytes(prompt[at : at + 4], "little") for at in (0, 4, 8))
                if gap_ms:
                    due = self._loop.time() + first_ms / 1000
                    self._loop.call_at(due, self._step, attempt, tokens, gap_ms / 1000, due)
                else:
                    for _ in range(tokens):
                        self._emit(attempt, Tokens(tokens=TOKEN))
                    self._done(attempt, tokens)
            case Cancel():
                self._prompts.pop(attempt, None)

    def close(self) -> None:
        self._prompts.clear()

    def _step(self, attempt: AttemptId, left: int, gap_s: float, due: float) -> None:
        self._emit(attempt, Tokens(tokens=TOKEN))
        if left > 1:
            self._loop.call_at(due + gap_s, self._step, attempt, left - 1, gap_s, due + gap_s)
        else:
            self._done(attempt, left)

    def _done(self, attempt: AttemptId, tokens: int) -> None:
        self._emit(attempt, Done(reason=FinishReason.LENGTH, recomputed_tokens=1, output_tokens=tokens))


class Scripted:
    def describe(self) -> WorkerDescription:
        return WorkerDescription(node=WORKER, incarnation=LIFE, namespace=Namespace("n"), wire=WireRange(1, 1))

    def open_session(self, emit: Emit) -> Session:
        return Session(emit)


async def main() -> None:
    own = identity(Path(sys.argv[1]), PeerRole.DECODE_WORKER) if len(sys.argv) > 1 else None
    runtime = Scripted()
    grpc, tcp = await serve_worker(runtime, "127.0.0.1", 0, own), await serve_link(runtime, "127.0.0.1", 0, own)
    print(json.dumps({"pid": os.getpid(), "grpc": grpc.port, "tcp": tcp.port}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await tcp.stop(0)
    await grpc.stop(0)


if __name__ == "__main__":
    uvloop.run(main())
