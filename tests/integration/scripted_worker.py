"""A worker without a model behind a real token link: what it answers is a function of the prompt.

In a test's own process its state can be looked at; run as a program it can be killed:
`python scripted_worker.py NODE INCARNATION PORT [--link tcp] [--silent COMMAND]` prints its port once it accepts
connections, and each attempt that it leaves without an answer.
"""

import argparse
import asyncio
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from prfaas.cluster import Incarnation, Namespace, NodeId, WireRange
from prfaas.errors import Overloaded
from prfaas.node.link_server import Emit, serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.request import AttemptId, FinishReason, Permit
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Done,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)

COMMANDS = {"reserve": Reserve, "prefill": Prefill, "decode": Decode}
SERVE: dict[str, Callable[..., Any]] = {"grpc": serve_worker, "tcp": serve_link}


def completion(prompt: bytes, max_tokens: int) -> list[int]:
    """What the worker decodes: it depends on every byte of the prompt and on the position."""
    seed = sum(position * token for position, token in enumerate(struct.unpack(f"<{len(prompt) // 4}I", prompt), 1))
    return [(seed + step * 7919) % 50_000 for step in range(max_tokens)]


def permit(attempt: AttemptId) -> Permit:
    """What the worker lets the attempt's KV be sent with."""
    half = bytes.fromhex(attempt)[8:]
    return Permit(ticket=b"ticket: " + half, key_out=b"key out:" + half, key_back=b"key back" + half)


@dataclass
class Session:
    """What one router holds here, and what it has said so far."""

    runtime: "ScriptedRuntime"
    emit: Emit
    heard: list[tuple[AttemptId, Command]] = field(default_factory=list)
    held: dict[AttemptId, Command] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    decoding: dict[AttemptId, asyncio.Task[None]] = field(default_factory=dict)

    def handle(self, attempt: AttemptId, command: Command) -> None:
        self.heard.append((attempt, command))
        self.runtime.changed()
        if isinstance(command, Cancel):
            self._cancel(attempt)
        elif type(command) is self.runtime.silent:
            self.runtime.on_silence(attempt)
        else:
            self._answer(attempt, command)

    def close(self) -> None:
        for task in self.decoding.values():
            task.cancel()
        self.held.clear()
        self.closed.set()

    def commands(self, attempt: AttemptId) -> list[type]:
        return [type(command) for owner, command in self.heard if owner == attempt]

    def _cancel(self, attempt: AttemptId) -> None:
        self.held.pop(attempt, None)
        if not self.runtime.deaf and (task := self.decoding.pop(attempt, None)) is not None:
            task.cancel()

    def _answer(self, attempt: AttemptId, command: Command) -> None:
        match command:
            case Reserve() if len(self.held) >= self.runtime.room:
                self.emit(attempt, Failed(Overloaded("kv", retry_after_s=0.25)))
            case Reserve():
                self.held[attempt] = command
                address = f"kv.{self.runtime.node}.for.{command.source_region}:1"
                self.emit(
                    attempt,
                    Reserved(
                        kv_address=address,
                        generation=7,
                        incarnation=self.runtime.incarnation,
                        permit=permit(attempt),
                        held_tokens=self.runtime.held_tokens,
                    ),
                )
            case Prefill():
                count = len(command.prompt) // 4 - 1
                self.emit(
                    attempt,
                    PrefillDone(
                        queue_s=0.0,
                        compute_s=0.001,
                        exposed_s=0.0,
                        prefill_tokens=count,
                        kv_bytes=count * 10,
                        cached_tokens=self.runtime.cached_tokens,
                        pulled_bytes=self.runtime.pulled_bytes,
                        handover=self.runtime.handover,
                    ),
                )
            case Decode():
                self.decoding[attempt] = asyncio.create_task(self._decode(attempt), name=f"decode {attempt}")

    async def _decode(self, attempt: AttemptId) -> None:
        reserve = self.held[attempt]
        assert isinstance(reserve, Reserve)
        tokens = completion(reserve.prompt, reserve.sampling.max_tokens)
        for token in tokens:
            self.emit(attempt, Tokens(tokens=struct.pack("<I", token)))
            await asyncio.sleep(0)
        self.held.pop(attempt, None)
        self.emit(attempt, Done(reason=FinishReason.LENGTH, recomputed_tokens=1, output_tokens=len(tokens)))


class ScriptedRuntime:
    """`silent` is a command that is heard and never answered; a `deaf` worker decodes on after a cancel."""

    def __init__(
        self, node: str, incarnation: int, *, silent: type | None = None, deaf: bool = False, room: int = 1000
    ) -> None:
        self.node, self.incarnation = NodeId(node), Incarnation(incarnation)
        self.silent, self.deaf, self.room = silent, deaf, room
        #: What it has, or had, from a cache.
        self.held_tokens = self.cached_tokens = self.pulled_bytes = 0
        #: What a prefill for a network of the engines' own hands over.
        self.handover = b""
        self.on_silence: Callable[[AttemptId], None] = lambda attempt: None
        self.sessions: list[Session] = []
        self._change = asyncio.Event()

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            node=self.node, incarnation=self.incarnation, namespace=Namespace("n"), wire=WireRange(1, 1)
        )

    def open_session(self, emit: Emit) -> Session:
        self.sessions.append(Session(self, emit))
        return self.sessions[-1]

    def changed(self) -> None:
        self._change.set()

    async def heard(self, kind: type, times: int = 1) -> AttemptId:
        """Waits until commands of this kind have come `times` times; the attempt of the last."""
        async with asyncio.timeout(10):
            while True:
                found = [owner for session in self.sessions for owner, said in session.heard if type(said) is kind]
                if len(found) >= times:
                    return found[-1]
                self._change.clear()
                await self._change.wait()


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node")
    parser.add_argument("incarnation", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--link", choices=SERVE, default="grpc")
    parser.add_argument("--silent", choices=COMMANDS)
    options = parser.parse_args()
    silent = COMMANDS[options.silent] if options.silent else None
    runtime = ScriptedRuntime(options.node, options.incarnation, silent=silent)
    runtime.on_silence = say
    server = await SERVE[options.link](runtime, "127.0.0.1", options.port)
    say(server.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
