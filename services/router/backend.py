"""The cluster behind the API: a request in, its flow run on the live ports, tokens out."""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from prfaas.cluster import ClusterView, Role
from prfaas.errors import Overloaded, PrfaasError
from prfaas.flows.ports import TokenBatch
from prfaas.flows.progress import attempt_s
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Attempt, Story
from prfaas.live.leg import Take
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.live.watchdog import Watchdog
from prfaas.request import NO_MATCHES, AttemptId, Matches, Request, RequestId
from services.router.metrics import RouterMetrics
from services.router.openai.port import ModelCard
from services.router.same_tokenizer import SameTokenizer

#: Of a stream whose tokens are diverted: the limits that flows put on their waits are much longer.
LIVELY_S = 5.0
#: A model whose last worker left is away so long, and unknown afterwards.
MODEL_AWAY_S = 900.0
#: What is cached of a request's prompt.
Find = Callable[[Request], Awaitable[Matches]]


class ClusterBackend:
    """`view` is this router's own copy of the cluster, and `matches` reads one of what is cached: nothing remote is
    asked on the way of a request. `salt` is a tenant's. `poisoned` says why answers would be wrong, if they would."""

    def __init__(
        self,
        view: SameTokenizer,
        ports: LiveServePorts,
        steering: Steering,
        params: ServeParams,
        metrics: RouterMetrics,
        max_in_flight: int,
        salt: Callable[[str], bytes],
        matches: Find | None = None,
        *,
        watchdog: Watchdog,
        poisoned: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._watchdog, self._poisoned = watchdog, poisoned
        self._salt, self._matches = salt, matches
        self._view, self._ports, self._params, self._steering = view, ports, params, steering
        self._metrics, self._max_in_flight = metrics, max_in_flight
        #: How often such a stream shows its flow that it is alive.
        self._lively_s = min(LIVELY_S, params.token_gap_timeout_s / 4)
        self._seen: ClusterView | None = None
        self._cards: Sequence[ModelCard] = ()
        #: When each was last seen to be served, in monotonic seconds; of those that are now it is not said.
        self._last_served: dict[str, float] = {}
        self._places: int | None = None
        self._in_flight = 0
        #: Of the attempts whose tokens are diverted.
        self._takes: dict[AttemptId, Take] = {}
        self._created = int(time.time())
        self.draining = False

    def models(self) -> Sequence[ModelCard]:
        self._look()
        return self._cards

    def was_served(self, model: str) -> bool:
        self._look()
        return time.monotonic() - self._last_served.get(model, float("-inf")) < MODEL_AWAY_S

    def places(self) -> int | None:
        """For sequences, on all nodes that decode; None when one of them does not say."""
        self._look()
        return self._places

    def _look(self) -> None:
        view = self._view()
        if view is not self._seen:
            self._last_served |= dict.fromkeys((card.id for card in self._cards), time.monotonic())
            self._seen, self._cards, self._places = view, self._cards_of(view), _places(view)

    def _cards_of(self, view: ClusterView) -> Sequence[ModelCard]:
        longest: dict[str, ModelCard] = {}
        capabilities: dict[str, frozenset[str]] = {}
        for node in (view.nodes[node_id] for node_id in view.decode):
            card = longest.get(node.model)
            capabilities[node.model] = capabilities.get(node.model, frozenset(node.capabilities)) & {*node.capabilities}
            if card is None or card.max_context_tokens < node.max_context_tokens:
                longest[node.model] = ModelCard(
                    id=node.model,
                    created=self._created,
                    max_context_tokens=node.max_context_tokens,
                    eos_token_ids=node.eos_token_ids,
                )
        return [replace(longest[model], capabilities=capabilities[model]) for model in sorted(longest)]

    def obstacle(self) -> str | None:
        view = self._view()
        if view.decode:
            return "this router is draining" if self.draining else self._poisoned()
        if not view.nodes and self._view.others:
            return f"the tokenizer of {self._view.others[0]} is not this router's"
        draining = any(node.role is not Role.PREFILL and node.load.draining for node in view.nodes.values())
        return "all nodes that decode are draining" if draining else "no live worker serves a model"

    async def complete(self, request: Request, story: Story) -> AsyncGenerator[TokenBatch, None]:
        if self._in_flight >= self._max_in_flight:
            raise Overloaded("requests in flight")
        self._in_flight += 1
        self._steering.decisions.begun(request, story)
        attempt: Attempt | None = None
        try:
            with self._watchdog.watch(request.id, story, attempt_s(request, self._params)) as watch:
                request, matches = await self._looked_up(request)
                async with aclosing(serve(request, matches, self._params, self._ports, story)) as batches:
                    async for batch in batches:
                        self._came(story, batch.tokens)
                        watch.handed_over()
                        yield batch
                        watch.resumed()
                        if attempt is not story.attempts[-1]:
                            self._taken_over(attempt, story.attempts[-1])
                            attempt = story.attempts[-1]
        finally:
            self._in_flight -= 1
            if attempt is not None:
                self._takes.pop(attempt.id, None)
            if story.finish is not None:
                self._steering.finished(story.output_tokens, self._ports.now())

    def divert(self, story: Story, take: Take) -> None:
        gap = self._metrics.gap

        def count_if_taken(tokens: bytes, now_s: float) -> bool:
            if not take(tokens, now_s):
                return False
            if story.last_s is not None:
                gap(now_s - story.last_s)
            story.last_s = now_s
            story.handed_out(tokens)
            return True

        self._divert(story.attempts[-1], count_if_taken)

    def _divert(self, attempt: Attempt, take: Take) -> None:
        self._takes[attempt.id] = take
        self._ports.divert(attempt.route.decode, attempt.id, take, self._lively_s)

    def _taken_over(self, before: Attempt | None, attempt: Attempt) -> None:
        """The stream comes from another attempt now. Its first tokens have gone out the long way, so that no later ones
        can be diverted past them."""
        if before is not None and (take := self._takes.pop(before.id, None)) is not None:
            self._divert(attempt, take)

    def _came(self, story: Story, tokens: bytes) -> None:
        now_s = self._ports.now()
        if story.last_s is not None and tokens:
            self._metrics.gap(now_s - story.last_s)
        story.last_s = now_s

    async def predicted_ttft_s(self, request: Request) -> float | None:
        """If it went to the workers now; None when that is not known."""
        request = replace(request, salt=self._salt(request.tenant))
        try:
            finding = self._look_up(request)
            matches = await self._ports.within(self._params.reserve_timeout_s, "prediction", finding)
            route = self._params.choose(request, matches, self._ports.view(), self._ports.routing(), frozenset())
        except PrfaasError:
            return None
        return route.predicted_ttft_s

    async def _look_up(self, request: Request) -> Matches:
        return NO_MATCHES if self._matches is None else await self._matches(request)

    async def _looked_up(self, request: Request) -> tuple[Request, Matches]:
        """The request with the salt of its tenant, and what is cached of it."""
        request = replace(request, salt=self._salt(request.tenant))
        if self._matches is None:
            return request, NO_MATCHES
        return request, await self._matches(request)

    def new_request_id(self) -> RequestId:
        return RequestId(secrets.token_hex(16))

    def metrics_text(self) -> bytes:
        ready = self.obstacle() is None
        return self._metrics.exposition(self._view(), self._in_flight, self._steering, ready=ready)


def _places(view: ClusterView) -> int | None:
    places = [view.nodes[node_id].max_sequences for node_id in view.decode]
    return sum(places) if places and all(places) else None


def new_attempt_id() -> AttemptId:
    return AttemptId(secrets.token_hex(16))
