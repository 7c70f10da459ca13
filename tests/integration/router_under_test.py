"""The HTTP front with the OpenAI API on it, in a thread with an event loop of its own, and a backend that echoes."""

import asyncio
import itertools
import math
import queue
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, TypeVar

from prfaas.cluster import LOGPROBS, NodeId
from prfaas.errors import Overloaded, PeerUnavailable, Stopping
from prfaas.flows.ports import PrefillReport, TokenBatch
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.request import TOKEN_BYTES, AttemptId, FinishReason, Path, Reason, Request, RequestId, Route, Score
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.tokenizer.port import Tokenizer
from services.router.admission import Gate
from services.router.admission_keys import LiveKeys
from services.router.http.limits import Limits
from services.router.http.server import HttpServer
from services.router.openai.api import OpenAiApi
from services.router.openai.port import ModelCard
from services.router.openai.record import RequestLog
from services.router.openai.settings import OpenAiSettings

T = TypeVar("T")
#: Nothing in these tests takes longer, unless it hangs.
LIVENESS_S = 20.0

ROOM = AdmissionParams(max_running=10_000)

#: What a model does, by its name.
ECHO, STUCK, STALLS, BREAKS, FULL, BUGGY, ENDLESS = "echo", "stuck", "stalls", "breaks", "full", "buggy", "endless"


def scored(token: bytes, count: int) -> TokenBatch:
    """With a probability of a half, the ids above it with a quarter, an eighth and so on."""
    token_id = int.from_bytes(token, "little")
    best = tuple((token_id + rank, 3.0 - (rank + 1) * math.log(2)) for rank in range(count))
    return TokenBatch(tokens=token, top_logits=(best,), scores=(Score(best[0][1], 3.0),))


class EchoBackend:
    """Answers with the tokens of the prompt, one by one."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.why_not: str | None = None
        self.names = (ECHO, STUCK, STALLS, BREAKS, FULL, BUGGY, ENDLESS)
        #: Names that were served before.
        self.left: set[str] = set()
        self.running = 0
        #: What stalls fails with this.
        self.stopping = asyncio.Event()
        #: Whose completions were begun, in order.
        self.tenants: queue.Queue[str] = queue.Queue()
        self.sent_batches = 0
        self.requests: list[Request] = []
        #: One entry for each completion that has ended, with the time it did.
        self.ended: queue.Queue[float] = queue.Queue()

    def models(self) -> Sequence[ModelCard]:
        return [
            ModelCard(
                id=name,
                created=1,
                max_context_tokens=2000,
                eos_token_ids=(1,),
                capabilities=frozenset({LOGPROBS} if name == ECHO else ()),
            )
            for name in self.names
        ]

    def was_served(self, model: str) -> bool:
        return model in self.left

    def obstacle(self) -> str | None:
        return self.why_not

    def new_request_id(self) -> RequestId:
        return RequestId(f"{next(self._ids):032x}")

    def metrics_text(self) -> bytes:
        return b"# TYPE prfaas_up gauge\nprfaas_up 1\n"

    def divert(self, story: Story, take: Callable[[bytes], bool]) -> None:
        """All tokens come out of `complete`."""

    async def complete(self, request: Request, story: Story) -> AsyncGenerator[TokenBatch, None]:
        self.running += 1
        self.tenants.put(request.tenant)
        self.requests.append(request)
        try:
            async for batch in self._complete(request, story):
                self.sent_batches += 1
                yield batch
            story.attempts[-1].ending = Ending.DONE
        finally:
            self.running -= 1
            self.ended.put(time.monotonic())

    async def _complete(self, request: Request, story: Story) -> AsyncGenerator[TokenBatch, None]:
        match request.model:
            case "full":
                raise Overloaded("kv bytes", retry_after_s=3.0)
            case "buggy":
                raise ValueError("a secret")
            case "stuck":
                await asyncio.sleep(3600)
        node = NodeId("d0")
        route = Route(
            prefill=node,
            decode=node,
            path=Path.LOCAL,
            reason=Reason.SHORT_PROMPT,
            uncached_tokens=request.handoff_tokens,
            transfer_tokens=0,
            threshold_tokens=1000,
        )
        story.attempts.append(Attempt(AttemptId("a"), route))
        started = time.monotonic()
        await asyncio.sleep(0.02)
        story.terms["prefill"] = time.monotonic() - started
        story.prefill = PrefillReport(
            queue_s=0.0, compute_s=0.02, exposed_s=0.0, prefill_tokens=1, kv_bytes=0, cached_tokens=1
        )
        tokens = [request.prompt[at : at + TOKEN_BYTES] for at in range(0, len(request.prompt), TOKEN_BYTES)]
        shown = tokens[: request.sampling.max_tokens]
        for number, token in enumerate(itertools.cycle(shown) if request.model == ENDLESS else shown, start=1):
            if number == 3 and request.model == BREAKS:
                raise PeerUnavailable("d0", "the link broke")
            if number == 3 and request.model == STALLS:
                await self.stopping.wait()
                raise Stopping("the router")
            yield scored(token, request.top_logits) if request.top_logits else TokenBatch(tokens=token)
            await asyncio.sleep(0)
        finish = FinishReason.LENGTH if len(tokens) > len(shown) else FinishReason.STOP
        yield TokenBatch(tokens=b"", finish=finish)


class Door:
    """The admission of the router under test, with what a test may turn: its clock, what it predicts for the time to
    the first token, how many routers there are, and what the workers take on."""

    def __init__(self, keys_file: FilePath | None, params: AdmissionParams) -> None:
        self.skipped_s, self.predicted_s, self.routers = 0.0, 0.0, 1
        self.places: int | None = None
        self.let_in: Counter[str] = Counter()
        self.turned_away: Counter[tuple[str, str]] = Counter()
        self.keys = LiveKeys(keys_file) if keys_file is not None else None
        self.machine = Admission(params)
        self.gate = Gate(
            self.machine, self.keys, self, self.predict, self.now, lambda: self.routers, lambda: self.places
        )

    def admitted(self, tenant: str, waited_s: float) -> None:
        self.let_in[tenant] += 1

    def refused(self, tenant: str, reason: str) -> None:
        self.turned_away[tenant, reason] += 1

    async def predict(self, request: Request) -> float | None:
        return self.predicted_s

    def now(self) -> float:
        return time.monotonic() + self.skipped_s


class Router:
    """A running front. `logs` has one record for each finished request."""

    def __init__(
        self,
        runner: asyncio.Runner,
        tokenizer: Tokenizer,
        limits: Limits,
        keys_file: FilePath | None = None,
        admission: AdmissionParams = ROOM,
    ) -> None:
        self.backend = EchoBackend()
        self.door = Door(keys_file, admission)
        self.logs: queue.Queue[RequestLog] = queue.Queue()
        self._runner = runner
        api = OpenAiApi(
            self.backend,
            tokenizer,
            OpenAiSettings(),
            self.door.gate,
            now=time.monotonic,
            wall=time.time,
            new_seed=lambda: 7,
            observe=self.logs.put,
        )
        self.server = HttpServer(api.handle, limits, by_head=api.refused_by_head)
        self.port = 0

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the router's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._runner.get_loop()).result(LIVENESS_S)

    def log(self) -> RequestLog:
        return self.logs.get(timeout=LIVENESS_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def running_router(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    tokenizer: Tokenizer,
    limits: Limits,
    tls: ssl.SSLContext | None = None,
    keys_file: FilePath | None = None,
    admission: AdmissionParams = ROOM,
) -> Iterator[Router]:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        router = Router(runner, tokenizer, limits, keys_file, admission)
        thread = threading.Thread(target=loop.run_forever, name="router")
        thread.start()
        try:
            router.port = router.call(router.server.start("127.0.0.1", 0, ssl=tls))
            yield router
            router.call(router.server.drain(0.0))
            assert router.server.connections == 0
            assert router.backend.running == 0
            router.door.machine.check()
            assert (router.door.machine.running, len(router.door.machine.turns)) == (0, 0)
            # In debug mode asyncio also tells of clients that do not speak TLS.
            assert [one for one in complaints if not isinstance(one.get("exception"), ssl.SSLError)] == []
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
