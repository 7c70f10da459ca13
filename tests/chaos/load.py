"""Requests that keep coming while things break, whatever becomes of those before, and the verdict on each.

Wrong is any token or character that is not the reference's, also in what was sent before an error or before the client
left. Hung is a stream of which nothing has come for `HUNG_S`, and a whole answer after `WHOLE_S`. Everything else that
is no answer is an error, counted by its kind, of which only `RIGHT_KINDS` are right: what says that something is away,
and comes with a status that clients retry.

A client does what that asks for: after a first error it waits for a moment and asks once more, another router if there
is one. What fails then as well has `failed`. Of each error it is noted which faults explain it, if any do.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import openai
from openai import AsyncOpenAI

from services.local_cluster import LocalCluster
from tests.chaos.answers import Got, differences
from tests.chaos.asked import Asked

#: The longest that a client may be without anything new, with all deadlines of the stages on the way, and without an
#: answer that comes as a whole.
HUNG_S, WHOLE_S = 60.0, 120.0
#: So many are open at once at the most; what comes on top is held back.
MAX_OPEN = 24
#: Which of the clients leave early, and after how many pieces of a stream at the most.
LEAVES, LEAVES_AFTER = 0.12, 10
#: What a client waits before it asks again, as `Retry-After` says.
AGAIN_S = 1.0
#: 503: a worker is away or there is no room; 504: a deadline; 429: too much at once. In a stream, after its first
#: token, the same have no status. `router gone`: the process that the client talked to was killed or is not back yet.
GONE = "router gone"
RIGHT_KINDS = frozenset({"503", "504", "429", "503 in the stream", "504 in the stream", GONE})
TYPES = {"service_unavailable": "503", "timeout_error": "504", "rate_limit_error": "429"}


class Known(Protocol):
    """Of what was done to the cluster."""

    def hurt(self, process: str, since: float) -> bool:
        """Whether it was away at any time since then."""
        ...

    def explanation(self, routers: Collection[str], since: float) -> str | None:
        """Why who asked these routers since then could not be served, if that was so."""
        ...


@dataclass(frozen=True, slots=True)
class Error:
    """`why` is None where no fault explains it."""

    at_s: float
    kind: str
    why: str | None
    what: str


@dataclass
class Tally:
    """`errors` are those of first tries, `failed` those of second ones; `wrong` and `hung` in words. `moves`: how often
    streams went on elsewhere."""

    sent: int = 0
    right: int = 0
    right_again: int = 0
    left: int = 0
    held_back: int = 0
    tokens: int = 0
    moves: int = 0
    remote: int = 0
    errors: list[Error] = field(default_factory=list)
    failed: list[Error] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    #: Right answers since the last error.
    in_a_row: int = 0


def kinds(errors: Sequence[Error]) -> Counter[str]:
    return Counter(error.kind for error in errors)


def needless(errors: Sequence[Error]) -> list[Error]:
    return [error for error in errors if error.why is None]


class Load:
    def __init__(self, cluster: LocalCluster, asked: Sequence[Asked], dice: random.Random, known: Known) -> None:
        self.tally, self._cluster, self._asked, self._dice = Tally(), cluster, asked, dice
        self._known = known
        self._open: set[asyncio.Task[None]] = set()
        self._now = asyncio.get_running_loop().time

    async def run(self, per_s: float) -> None:
        """Until cancelled; then nothing new comes, and all that was sent has ended or has hung."""
        clients = {
            name: AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0, timeout=2 * WHOLE_S)
            for name, endpoint in self._cluster.endpoints.items()
        }
        try:
            while True:
                self._send(clients)
                await asyncio.sleep(self._dice.expovariate(per_s))
        finally:
            if self._open:
                await asyncio.wait(self._open, timeout=4 * WHOLE_S)
            await asyncio.gather(*(client.close() for client in clients.values()))

    def _send(self, clients: dict[str, AsyncOpenAI]) -> None:
        asked, routers = self._dice.choice(self._asked), self._dice.sample(sorted(clients), 2)
        leaves_after = self._dice.randrange(LEAVES_AFTER) if self._dice.random() < LEAVES else None
        if len(self._open) >= MAX_OPEN:
            self.tally.held_back += 1
            return
        self.tally.sent += 1
        task = asyncio.create_task(self._one({name: clients[name] for name in routers}, asked, leaves_after))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _one(self, clients: dict[str, AsyncOpenAI], asked: Asked, leaves_after: int | None) -> None:
        tally, begun, tried = self.tally, self._now(), list[str]()
        for router, client in clients.items():
            tried.append(router)
            error = await self._tried(client, tried, begun, asked, leaves_after)
            if error is None:
                tally.right_again += len(tried) > 1
                return
            (tally.errors if len(tried) == 1 else tally.failed).append(error)
            await asyncio.sleep(AGAIN_S)

    async def _tried(
        self, client: AsyncOpenAI, tried: Sequence[str], begun: float, asked: Asked, leaves_after: int | None
    ) -> Error | None:
        """An error of the last of these routers; None when the request is over."""
        tally, got, asked_at = self.tally, Got(), self._now()
        try:
            async with asyncio.timeout(HUNG_S if asked.stream else WHOLE_S) as limit:
                whole = await self._ask(client, asked, got, leaves_after, limit)
        except TimeoutError:
            waited_s = self._now() - asked_at
            tally.hung.append(f"{asked.name} at {tried[-1]}: no end after {waited_s:g} s, {got.pieces} pieces came")
            return None
        except Exception as error:  # what is no error of the right kind has to be seen, too
            tally.in_a_row = 0
            self._check(asked, got, whole=False)
            kind = _kind(error, self._known.hurt(tried[-1], asked_at))
            why = self._known.explanation(tried, begun)
            return Error(self._now(), kind, why, f"{asked.name} at {tried[-1]}: {error!r}"[:400])
        self._check(asked, got, whole)
        tally.left += not whole
        tally.right += whole
        tally.in_a_row += 1
        tally.moves += got.receipt.get("migrations") or 0
        tally.remote += got.receipt.get("path") == "remote"
        return None

    async def _ask(
        self, client: AsyncOpenAI, asked: Asked, got: Got, leaves_after: int | None, limit: asyncio.Timeout
    ) -> bool:
        """Whether the client has stayed to the end."""
        body = asked.body(self._cluster.plan.model_dir.name) | {"extra_headers": {"x-prfaas-receipt": "1"}}
        if not asked.stream:
            got.add(await client.completions.create(**body))
            return True
        stream = await client.completions.create(**body)
        async for chunk in stream:
            got.add(chunk)
            limit.reschedule(self._now() + HUNG_S)
            if leaves_after is not None and got.pieces > leaves_after:
                await stream.close()
                return False
        return True

    def _check(self, asked: Asked, got: Got, whole: bool) -> None:
        self.tally.tokens += sum(len(tokens) for tokens in got.tokens.values())
        self.tally.wrong += differences(asked, got, whole)


def _kind(error: Exception, router_hurt: bool) -> str:
    match error:
        case openai.APIStatusError(status_code=status):
            return str(status)
        case openai.APIConnectionError():
            return GONE if router_hurt else f"connection: {type(error).__name__}"
        case openai.APIError(type=kind) if kind is not None:
            return f"{TYPES.get(kind, kind)} in the stream"
        case _:  # of the client's HTTP library, in the middle of a stream
            return GONE if router_hurt else f"{type(error).__name__} in the stream"
