"""The cluster behind the API: a request in, its flow run on the live ports, tokens out."""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from prfaas.cluster import ClusterView, Role
from prfaas.errors import Overloaded
from prfaas.flows.ports import ServePorts, TokenBatch
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Story
from prfaas.live.steering import Steering
from prfaas.request import NO_MATCHES, AttemptId, Matches, Request, RequestId
from services.router.metrics import RouterMetrics
from services.router.openai.port import ModelCard

#: What is cached of a request's prompt.
Find = Callable[[Request], Awaitable[Matches]]


class ClusterBackend:
    """`view` is this router's own copy of the cluster, and `matches` reads one of what is cached: nothing remote is
    asked on the way of a request. `salt` is a tenant's."""

    def __init__(
        self,
        view: Callable[[], ClusterView],
        ports: ServePorts,
        steering: Steering,
        params: ServeParams,
        metrics: RouterMetrics,
        max_in_flight: int,
        salt: Callable[[str], bytes],
        matches: Find | None = None,
    ) -> None:
        self._salt, self._matches = salt, matches
        self._view, self._ports, self._params, self._steering = view, ports, params, steering
        self._metrics, self._max_in_flight = metrics, max_in_flight
        self._in_flight = 0
        self._created = int(time.time())
        self.draining = False

    def models(self) -> Sequence[ModelCard]:
        view = self._view()
        longest: dict[str, ModelCard] = {}
        for node in (view.nodes[node_id] for node_id in view.decode):
            card = longest.get(node.model)
            if card is None or card.max_context_tokens < node.max_context_tokens:
                longest[node.model] = ModelCard(
                    id=node.model,
                    created=self._created,
                    max_context_tokens=node.max_context_tokens,
                    eos_token_ids=node.eos_token_ids,
                )
        return [longest[model] for model in sorted(longest)]

    def obstacle(self) -> str | None:
        view = self._view()
        if view.decode:
            return "this router is draining" if self.draining else None
        draining = any(node.role is not Role.PREFILL and node.load.draining for node in view.nodes.values())
        return "all nodes that decode are draining" if draining else "no live worker serves a model"

    async def complete(self, request: Request, story: Story) -> AsyncGenerator[TokenBatch, None]:
        if self._in_flight >= self._max_in_flight:
            raise Overloaded("requests in flight")
        self._in_flight += 1
        self._steering.decisions.begun(request, story)
        try:
            request, matches = await self._looked_up(request, story)
            async with aclosing(serve(request, matches, self._params, self._ports, story)) as batches:
                last_s: float | None = None
                async for batch in batches:
                    now_s = self._ports.now()
                    if last_s is not None and batch.tokens:
                        self._metrics.gap(now_s - last_s)
                    last_s = now_s
                    yield batch
        finally:
            self._in_flight -= 1
            if story.finish is not None:
                self._steering.finished(story.output_tokens, self._ports.now())

    async def _looked_up(self, request: Request, story: Story) -> tuple[Request, Matches]:
        """The request with the salt of its tenant, and what is cached of it."""
        request = replace(request, salt=self._salt(request.tenant))
        if self._matches is None:
            return request, NO_MATCHES
        begun_s = self._ports.now()
        matches = await self._matches(request)
        story.terms["route"] = self._ports.now() - begun_s
        return request, matches

    def new_request_id(self) -> RequestId:
        return RequestId(secrets.token_hex(16))

    def metrics_text(self) -> bytes:
        return self._metrics.exposition(self._view(), self._in_flight, self._steering)


def new_attempt_id() -> AttemptId:
    return AttemptId(secrets.token_hex(16))
