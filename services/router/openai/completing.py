"""A completion, from its body to its answer: the endpoints that answer with tokens."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from prfaas.errors import InvalidRequest
from prfaas.flows.story import Story
from prfaas.observe.tracing import Tracing
from prfaas.tokenizer.port import Tokenizer
from services.router.admission_port import AdmissionPort, Caller
from services.router.http import sse
from services.router.http.messages import HttpRequest, Outlet, Response, StreamingResponse
from services.router.openai import spans
from services.router.openai.account import Account
from services.router.openai.catalogue import Catalogue
from services.router.openai.chat import CHAT
from services.router.openai.endpoint import Endpoint
from services.router.openai.exchange import Exchange
from services.router.openai.generation import Piece, TextAssembler, pieces
from services.router.openai.intake import make_requests, stop_strings
from services.router.openai.interleave import interleaved
from services.router.openai.port import Backend
from services.router.openai.record import RequestLog
from services.router.openai.response_answer import ResponseExchange
from services.router.openai.responses import ResponsesBody, in_the_words_of_responses, to_chat
from services.router.openai.schema import B, decode_body
from services.router.openai.settings import OpenAiSettings
from services.router.openai.shortcut import Shortcut, Spellings
from services.router.openai.turn import in_turn

Answer = AsyncGenerator[Piece, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completing:
    backend: Backend
    catalogue: Catalogue
    tokenizer: Tokenizer
    settings: OpenAiSettings
    admission: AdmissionPort
    now: Callable[[], float]
    wall: Callable[[], float]
    new_seed: Callable[[], int]
    tracing: Tracing
    spellings: Spellings

    async def complete(
        self, endpoint: Endpoint[B], http: HttpRequest, record: RequestLog, caller: Caller
    ) -> Response | StreamingResponse:
        self._begun(http, record)
        body = decode_body(http.body, endpoint.body)
        account, answer, texts = await self._begin(endpoint, body, http, record, caller)
        options = body.stream_options
        exchange = Exchange(
            endpoint=endpoint,
            account=account,
            tokenizer=self.tokenizer,
            echoes=_each(endpoint.echoes(body, self.tokenizer, account.prompts), account.choices),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            wants_token_ids=bool(body.return_token_ids),
            top_logprobs=endpoint.top_logprobs(body),
        )
        opened = None
        if len(texts) == 1 and texts[0].plain and exchange.plain:
            opened = Shortcut(self.backend, account.stories[0], record, texts[0], exchange, self.spellings).opened
        return await _answered(exchange, answer, bool(body.stream), opened)

    async def respond(self, http: HttpRequest, record: RequestLog, caller: Caller) -> Response | StreamingResponse:
        self._begun(http, record)
        body = decode_body(http.body, ResponsesBody)
        try:
            account, answer, _ = await self._begin(CHAT, to_chat(body), http, record, caller)
        except InvalidRequest as error:
            raise in_the_words_of_responses(error) from error
        return await _answered(ResponseExchange(body=body, account=account), answer, bool(body.stream))

    def _begun(self, http: HttpRequest, record: RequestLog) -> None:
        record.lap_s = http.received_s
        record.waited(self.now())
        if self.tracing.on:
            spans.begin(self.tracing, http, record, record.lap_s)

    async def _begin(
        self, endpoint: Endpoint[B], body: B, http: HttpRequest, record: RequestLog, caller: Caller
    ) -> tuple[Account, Answer, Sequence[TextAssembler]]:
        """The answer is begun by whoever takes its first piece; its sequences' texts are put together as it goes."""
        card = self.catalogue.card(body.model, caller)
        self.admission.check_limits(caller)
        record.model, record.stream = card.id, bool(body.stream)
        record.completion_id = request_id = self.backend.new_request_id()
        requests = await make_requests(
            endpoint, body, card, self.tokenizer, self.settings, request_id, self.backend.new_request_id, self.new_seed
        )
        weight, traceparent = caller.quota.weight, record.traceparent or ""
        if caller.tenant or weight != 1.0 or traceparent:
            requests = [
                replace(request, tenant=caller.tenant, weight=weight, traceparent=traceparent) for request in requests
            ]
        stories = [Story() for _ in requests]
        record.story, record.siblings, record.requests = stories[0], tuple(stories[1:]), requests
        account = Account(
            requests=requests,
            stories=stories,
            choices=body.n or 1,
            record=record,
            received_s=http.received_s,
            now=self.now,
            created=int(self.wall()),
            wants_receipt=http.headers.get("x-prfaas-receipt") == "1",
        )
        record.prompt_tokens = account.prompt_tokens
        record.tokenized(self.now())
        stops, scores = stop_strings(body), endpoint.top_logprobs(body) is not None
        texts = [
            TextAssembler(self.tokenizer, stops, request.sampling.stop_token_ids, index=index, scores=scores)
            for index, request in enumerate(requests)
        ]
        answer = interleaved(
            [
                pieces(self.backend.complete(request, story), text)
                for request, story, text in zip(requests, stories, texts, strict=True)
            ]
        )
        turn = in_turn(
            self.admission,
            caller,
            requests,
            http.received_s,
            record,
            answer,
            self.now,
        )
        return account, turn, texts


async def _answered(
    exchange: Exchange | ResponseExchange,
    answer: Answer,
    stream: bool,
    opened: Callable[[Outlet], None] | None = None,
) -> Response | StreamingResponse:
    if not stream:
        return Response(200, await exchange.whole(answer))
    first = await anext(answer)  # until there is a token, a failure still has a status of its own
    return StreamingResponse(exchange.stream(first, answer), sse.CONTENT_TYPE, headers=sse.HEADERS, opened=opened)


def _each(echoes: list[str], choices: int) -> list[str]:
    """One for each choice of each prompt."""
    return [echo for echo in echoes for _ in range(choices)]
