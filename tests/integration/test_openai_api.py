"""What the OpenAI API can be asked for, over real sockets: several answers, probabilities, responses, tokens."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvloop

from prfaas.tokenizer.text import TextTokenizer, load_tokenizer, unpack
from services.router.http.limits import Limits
from services.router.openai.document import OPERATIONS
from tests.integration.router_under_test import (
    BREAKS,
    BUGGY,
    ECHO,
    ENDLESS,
    FULL,
    LIVENESS_S,
    STALLS,
    STUCK,
    Router,
    running_router,
)
from tests.integration.wire import Wire
from tests.unit.tokenizer.byte_level import BOS, BOS_ID, write_model_dir

TEXT = "Grüße, 你好 🙂 the fox"
HELLO: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def router(tokenizer: TextTokenizer) -> Iterator[Router]:
    with running_router(uvloop.new_event_loop, tokenizer, Limits(max_body_bytes=1 << 20)) as router:
        yield router


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url, api_key="none", max_retries=0, timeout=LIVENESS_S) as client:
        yield client


@pytest.fixture
def wire(router: Router) -> Iterator[Wire]:
    with Wire(router.port) as wire:
        yield wire


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + text
    return texts


# Several answers.


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_as_many_answers_as_are_asked_for(client: openai.OpenAI, router: Router, stream: bool):
    """Each from a sequence of its own with a seed of its own; the prompt is counted once."""
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.chat.completions.create(model=ECHO, messages=HELLO, n=3, seed=5, stream=stream, **options)
    if stream:
        chunks = list(answer)
        texts, usage = texts_of(chunks), chunks[-1].usage
        finishes = Counter(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason)
        roles = Counter(choice.index for chunk in chunks for choice in chunk.choices if choice.delta.role)
        assert finishes == roles == Counter([0, 1, 2])
        first_end = next(at for at, chunk in enumerate(chunks) if chunk.choices and chunk.choices[0].finish_reason)
        assert {choice.index for chunk in chunks[:first_end] for choice in chunk.choices} == {0, 1, 2}
    else:
        texts = {choice.index: choice.message.content or "" for choice in answer.choices}
        usage = answer.usage
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 1 and TEXT in texts[0]
    requests = router.backend.requests
    assert len({request.sampling.seed for request in requests}) == len({request.id for request in requests}) == 3
    assert usage.prompt_tokens == requests[0].prompt_tokens
    assert usage.completion_tokens == 3 * requests[0].prompt_tokens
    record = router.log()
    assert (record.output_tokens, len(record.siblings)) == (usage.completion_tokens, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_prompts_is_answered_in_order(client: openai.OpenAI, stream: bool):
    """Texts or token ids; the index counts the answers of the first prompt, then those of the second."""
    for prompts in (["the fox", "你好 🙂"], [[70, 71], [72, 73, 74]]):
        kwargs: Any = {"model": ECHO, "prompt": prompts, "n": 2, "max_tokens": 500}
        answer: Any = client.completions.create(stream=stream, **kwargs)
        texts = texts_of(list(answer)) if stream else {choice.index: choice.text for choice in answer.choices}
        alone = [client.completions.create(model=ECHO, prompt=one, max_tokens=500).choices[0].text for one in prompts]  # type: ignore[arg-type]
        assert [texts[index] for index in sorted(texts)] == [alone[0], alone[0], alone[1], alone[1]]


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_ends_all_answers(wire: Wire, router: Router, stream: bool):
    """In a stream as an event, otherwise as the answer; nothing runs on."""
    body = {"model": BREAKS, "prompt": ["the quick brown fox"] * 3, "stream": stream}
    answer = wire.ask("POST", "/v1/completions", body)
    if stream:
        assert answer.events[-1]["error"]["type"] == "service_unavailable"
    else:
        assert answer.status == 503
    for _ in range(3):
        router.backend.ended.get(timeout=LIVENESS_S)
    assert router.backend.running == 0


def test_a_client_that_leaves_ends_all_its_answers(router: Router):
    """Within a second."""
    with Wire(router.port) as wire:
        body = json.dumps({"model": STALLS, "prompt": ["a b c d"] * 4, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        wire.send(head + body).read_head()
    for _ in range(4):
        router.backend.ended.get(timeout=LIVENESS_S)
    assert router.log().status == 499


@pytest.mark.parametrize(("fields", "param"), [({"n": 65}, "n"), ({"prompt": ["a"] * 65}, "prompt")])
def test_the_cost_of_one_request_is_bounded(wire: Wire, router: Router, fields: dict[str, Any], param: str):
    """In sequences, before any is begun."""
    answer = wire.ask("POST", "/v1/completions", {"model": ECHO, "prompt": "a"} | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert router.backend.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_line_of_a_stream_is_one_by_any_rule(wire: Wire, path: str):
    """Clients that split text at Unicode's line ends, which are plain characters in JSON, read the same events."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    body = {"model": ECHO, "stream": True} | (
        {"prompt": text, "max_tokens": 200} if path == "/v1/completions" else {"input": text}
    )
    answer = wire.ask("POST", path, body)
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert len(lines) == answer.body.count(b"data: {")
    if path == "/v1/completions":
        assert "".join(event["choices"][0]["text"] for event in events) == text
    else:
        assert text in events[-1]["response"]["output"][0]["content"][0]["text"]


# Echo and probabilities.


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_echoed_on_request(client: openai.OpenAI, stream: bool):
    """In front of each answer, as text also where it was token ids."""
    for prompt, shown in ((TEXT, TEXT), ([BOS_ID, 70, 71], None)):
        kwargs: Any = {"model": ECHO, "prompt": prompt, "max_tokens": 500, "n": 2}
        answer: Any = client.completions.create(stream=stream, echo=True, **kwargs)
        texts = texts_of(list(answer)) if stream else {choice.index: choice.text for choice in answer.choices}
        plain = client.completions.create(**kwargs).choices[0].text
        assert texts == {0: (shown or plain) + plain, 1: (shown or plain) + plain}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_shows_probabilities(client: openai.OpenAI, stream: bool):
    """Of each token and of the likeliest; the bytes of all make up the text."""
    answer: Any = client.chat.completions.create(
        model=ECHO, messages=HELLO, logprobs=True, top_logprobs=3, stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        content = [token for choice in chunks if choice.logprobs for token in choice.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in chunks)
    else:
        content, text = answer.choices[0].logprobs.content, answer.choices[0].message.content
    for token in content:
        assert token.logprob == pytest.approx(-math.log(2))
        expected = [-math.log(2), -2 * math.log(2), -3 * math.log(2)]
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(expected)
        assert token.top_logprobs[0].token == token.token
    shown = [bytes(token.bytes) for token in content if not token.token.startswith(("<|", "<s>"))]
    assert b"".join(shown).decode() == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_shows_probabilities_in_the_older_form(client: openai.OpenAI, stream: bool):
    """Where each token begins in the text, and the likeliest by their text."""
    kwargs: Any = {"model": ECHO, "prompt": TEXT, "max_tokens": 500, "logprobs": 2}
    answer: Any = client.completions.create(stream=stream, **kwargs)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    shown = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for each in shown for token in each.tokens]
    offsets = [offset for each in shown for offset in each.text_offset]
    assert text == TEXT
    assert len(tokens) == len(offsets) >= 10 and offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<s>")):
            assert text.startswith(token, offset)
    assert all(len(top) == 2 for each in shown for top in each.top_logprobs)


def test_engines_without_true_probabilities_are_not_asked_for_any(wire: Wire):
    """Nor for what else they do not declare; the parameter is named."""
    for fields in (
        {"logprobs": True},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ):
        answer = wire.ask("POST", "/v1/chat/completions", {"model": ENDLESS, "messages": HELLO} | fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(fields)))
    answer = wire.ask("POST", "/v1/completions", {"model": ECHO, "prompt": "x", "echo": True, "logprobs": 1})
    assert (answer.status, answer.json["error"]["param"]) == (400, "logprobs")


# Responses.


def test_the_official_client_gets_responses(client: openai.OpenAI):
    """From a text, or from messages in either form; what ended too early says so."""
    whole = client.responses.create(model=ECHO, input=TEXT, instructions="be brief")
    assert TEXT in whole.output_text and "be brief" in whole.output_text
    assert (whole.status, whole.object, whole.error) == ("completed", "response", None)
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.input_tokens_details.cached_tokens == 1
    parts: Any = [{"type": "input_text", "text": "the fox"}]
    again: Any = [{"role": "user", "content": parts}, whole.output[0].to_dict(), {"role": "user", "content": "again"}]
    assert "the fox" in client.responses.create(model=ECHO, input=again).output_text
    cut = client.responses.create(model=ECHO, input=TEXT, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_ends_where_it_is_told(wire: Wire):
    """As load generators ask for it that know vLLM."""
    fields = {"model": ECHO, "input": "the quick brown fox", "ignore_eos": True}
    answer = wire.ask("POST", "/v1/responses", fields | {"stop": [" brown"]}).json
    assert answer["output"][0]["content"][0]["text"].endswith("the quick")
    assert answer["status"] == "completed"
    assert wire.ask("POST", "/v1/responses", fields | {"stop": None}).status == 200
    assert wire.ask("POST", "/v1/responses", fields | {"stop": ""}).json["error"]["param"] == "stop"


def test_a_response_is_streamed_as_typed_events(client: openai.OpenAI):
    """In the order of the API, numbered without a gap; the parts are the whole."""
    events: list[Any] = list(client.responses.create(model=ECHO, input=TEXT, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 20
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events[4:-4])
    assert deltas == events[-4].text == events[-1].response.output_text
    assert TEXT in deltas
    assert len({event.item_id for event in events[3:-2]}) == 1


def test_events_carry_their_type_twice_and_there_is_no_done(wire: Wire):
    """As clients of the API expect them."""
    answer = wire.ask("POST", "/v1/responses", {"model": ECHO, "input": "x", "stream": True})
    blocks = [block.split("\n") for block in answer.body.decode().strip().split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_response_that_fails_in_the_stream_says_so(client: openai.OpenAI):
    """With the event of the API; before the first token it has a status of its own."""
    events: list[Any] = list(client.responses.create(model=BREAKS, input=TEXT, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "service_unavailable"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=FULL, input=TEXT, stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"max_output_tokens": 5000}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"n": 2}, "n"),
    ],
)
def test_what_responses_do_not_serve_is_refused_by_name(wire: Wire, fields: dict[str, Any], param: str):
    """In the words of this endpoint, not of the chat behind it."""
    answer = wire.ask("POST", "/v1/responses", {"model": ECHO, "input": "x"} | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


# Tokens.


def test_prompts_can_be_tokenized(wire: Wire, router: Router, tokenizer: TextTokenizer):
    """As completions and chats would be, in the words of vLLM."""
    router.backend.names = (ECHO,)
    shown = wire.ask("POST", "/tokenize", {"prompt": TEXT, "return_token_strs": True}).json
    assert shown["tokens"] == list(unpack(tokenizer.encode(TEXT, add_special_tokens=True)))
    assert (shown["count"], shown["max_model_len"]) == (len(shown["tokens"]), 2000)
    assert shown["token_strs"][0] == BOS
    plain = wire.ask("POST", "/tokenize", {"model": ECHO, "prompt": TEXT, "add_special_tokens": False}).json
    assert plain["tokens"] == shown["tokens"][1:] and plain["token_strs"] is None
    chat = wire.ask("POST", "/tokenize", {"messages": HELLO}).json
    usage = wire.ask("POST", "/v1/chat/completions", {"model": ECHO, "messages": HELLO}).json["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert (
        wire.ask("POST", "/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json["count"] < chat["count"]
    )
    assert wire.ask("POST", "/detokenize", {"tokens": shown["tokens"]}).json == {"prompt": BOS + TEXT}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": ECHO}, 400, "prompt"),
        ("/tokenize", {"model": ECHO, "prompt": "x", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "x"}, 400, "model"),
        (
            "/tokenize",
            {"model": ECHO, "messages": HELLO, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {"model": ECHO, "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": ECHO, "tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"model": ECHO, "tokens": [70] * 2001}, 400, "tokens"),
        ("/detokenize", {"model": ECHO}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    wire: Wire, path: str, body: dict[str, Any], status: int, param: str
):
    """Without a model only where there is but one."""
    answer = wire.ask("POST", path, body)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)


# The document.


def test_the_document_lists_what_is_served(wire: Wire):
    """Every operation of it is answered, and by no other method."""
    shown = wire.ask("GET", "/openapi.json").json
    assert len(shown["paths"]) == len(OPERATIONS)
    for path, operations in shown["paths"].items():
        here = path.replace("{model}", ECHO)
        for method in operations:
            assert wire.ask(method.upper(), here, {} if method == "post" else None).status in (200, 400)
        assert wire.ask("PUT", here).status == 405


ASKED: list[tuple[str, str, Any, dict[str, str], int]] = [
    ("POST", "/v1/completions", {"model": ECHO, "prompt": "x"}, {}, 200),
    ("POST", "/v1/completions", {"model": ECHO, "prompt": "x", "stream": True}, {}, 200),
    ("POST", "/v1/completions", {"model": FULL, "prompt": "x"}, {}, 503),
    ("POST", "/v1/completions", {"model": BUGGY, "prompt": "x"}, {}, 500),
    ("POST", "/v1/completions", {"model": "nobody", "prompt": "x"}, {}, 404),
    ("POST", "/v1/completions", {"model": STUCK, "prompt": "x"}, {"x_prfaas_ttft_deadline_ms": "50"}, 504),
    ("POST", "/v1/completions", b"{}" + b" " * (1 << 20), {}, 413),
    ("POST", "/v1/chat/completions", {"model": ECHO, "messages": HELLO, "stream": True}, {}, 200),
    ("POST", "/v1/responses", {"model": ECHO, "input": "x"}, {"x_request_id": "mine"}, 200),
    ("POST", "/tokenize", b"{", {}, 400),
    ("GET", "/v1/models", None, {"x_prfaas_priority": "best"}, 400),
    ("GET", "/v1/models", None, {"x" * 70_000: "y"}, 431),
    ("GET", "/metrics", None, {}, 200),
    ("GET", "/live", None, {"expect": "a miracle"}, 417),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), ASKED)
def test_answers_are_as_the_document_says(
    router: Router, method: str, path: str, body: Any, headers: dict[str, str], status: int
):
    """Their status, what they are made of, and the headers that they promise; errors also by their form."""
    with Wire(router.port) as wire:
        shown = wire.ask("GET", "/openapi.json").json
    with Wire(router.port) as wire:
        answer = wire.ask(method, path, body, **headers)
    assert answer.status == status
    described = shown["paths"][path][method.lower()]["responses"][str(status)]
    if "$ref" in described:
        described = shown["components"]["responses"][described["$ref"].rsplit("/", 1)[1]]
    assert answer.headers["content-type"].partition(";")[0] in described["content"]
    promised = {name for name, header in described["headers"].items() if header.get("required")}
    assert promised <= answer.headers.keys()
    if status != 200:
        facts = shown["components"]["schemas"]["ErrorFacts"]["properties"]
        assert set(answer.json) == {"error"} and set(answer.json["error"]) == set(facts)


async def test_many_answers_at_once_leave_nothing_behind(router: Router):
    """The fixture looks at what is left."""
    async with openai.AsyncOpenAI(base_url=router.url, api_key="none", max_retries=0, timeout=LIVENESS_S) as client:
        answers = await asyncio.gather(
            *[client.completions.create(model=ECHO, prompt=[TEXT] * 4, n=4, max_tokens=500) for _ in range(8)]
        )
    assert {len(answer.choices) for answer in answers} == {16}
    assert {choice.text for answer in answers for choice in answer.choices} == {TEXT}
