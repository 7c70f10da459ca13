"""Admission over real HTTP: every limit can be shown to trip, and whatever happens, everything comes back."""

import asyncio
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop

from prfaas.scheduling.admission import AdmissionParams
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer
from services.router import api_keys
from services.router.http.limits import Limits
from tests.integration.router_under_test import BREAKS, ECHO, LIVENESS_S, ROOM, STUCK, Router, running_router
from tests.integration.wire import Answer, Wire, request
from tests.unit.tokenizer.byte_level import write_model_dir

SALT = "00" * 16
NARROW = AdmissionParams(max_running=1, max_queued_requests=2, max_queued_tokens=1000)
Open = Callable[..., Router]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load_tokenizer(write_model_dir(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


class KeysFile:
    """`tenant` is a key of the tenant's own; its limits are what the file says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree: dict[str, Any] = {"salt": SALT, "tenants": {}, "keys": {}}
        self.write()

    def tenant(self, name: str, models: list[str] | None = None, **limits: Any) -> str:
        key_id, key, hashed = api_keys.new_key(api_keys.KeyFile(salt=SALT))
        self.tree["tenants"].setdefault(name, {}).update(limits)
        self.tree["keys"][key_id] = {"tenant": name, "hash": hashed} | ({} if models is None else {"models": models})
        self.write()
        return key

    def write(self) -> None:
        self.path.write_text(json.dumps(self.tree))


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


@pytest.fixture
def opened(tokenizer: TextTokenizer) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_(keys: KeysFile | None = None, admission: AdmissionParams = ROOM) -> Router:
            limits = Limits(max_body_bytes=200_000, max_head_bytes=8192)
            file = keys.path if keys is not None else None
            return stack.enter_context(
                running_router(uvloop.new_event_loop, tokenizer, limits, keys_file=file, admission=admission)
            )

        yield open_


def body(model: str = ECHO, prompt: Any = (70, 71, 72), max_tokens: int = 7, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens} | fields


def bearer(key: str | None, **headers: str) -> dict[str, str]:
    return headers if key is None else {"authorization": f"Bearer {key}", **headers}


def ask(router: Router, key: str | None = None, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """A completion of 3 prompt tokens and at most 7 of output, unless said otherwise."""
    with Wire(router.port) as wire:
        return wire.ask("POST", "/v1/completions", body(**fields), **bearer(key, **(headers or {})))


def begun(router: Router, key: str | None = None, **fields: Any) -> AbstractContextManager[Wire]:
    """A request that has been sent; its client leaves with the block."""
    wire = Wire(router.port)
    wire.send(request("POST", "/v1/completions", body(**fields), **bearer(key)))
    return closing(wire)


def until(router: Router, holds: Callable[[], bool]) -> None:
    """Looked at on the router's loop."""

    async def wait() -> None:
        async with asyncio.timeout(LIVENESS_S):
            while not holds():  # noqa: ASYNC110 - the machine is pure and tells nobody
                await asyncio.sleep(0.005)

    router.call(wait())


def waiting(router: Router, requests: int) -> None:
    until(router, lambda: len(router.door.machine.turns) == requests)


def running(router: Router, requests: int) -> None:
    until(router, lambda: router.door.machine.running == requests)


def refusal(answer: Answer) -> tuple[int, str]:
    assert set(answer.json) == {"error"} and set(answer.json["error"]) == {"message", "type", "param", "code"}
    return answer.status, answer.json["error"]["type"]


EXPECTED = b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"
TOO_MANY, BUSY, LATE = (429, "rate_limit_error"), (503, "service_unavailable"), (504, "timeout_error")


# Who may come in.


def test_without_a_file_the_endpoint_is_open(opened: Open):
    """Any key or none will do; the tenant is nobody."""
    router = opened()
    assert ask(router).status == ask(router, "anything").status == 200
    assert router.backend.tenants.get(timeout=LIVENESS_S) == ""


def test_with_a_file_a_key_is_needed(opened: Open, keys: KeysFile):
    """For everything but probes and scrapers."""
    key = keys.tenant("acme")
    router = opened(keys)
    for headers in ({}, bearer("sk-prfaas-wrong"), {"authorization": f"Basic {key}"}, {"authorization": key}):
        with Wire(router.port) as wire:
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
                answer = wire.ask(method, path, body() if method == "POST" else None, **headers)
                assert refusal(answer) == (401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert key not in answer.body.decode()
            for path in ("/live", "/ready", "/health", "/metrics"):
                assert wire.ask("GET", path).status == 200
    with openai.OpenAI(base_url=router.url, api_key=key, max_retries=0) as client:
        assert client.completions.create(model=ECHO, prompt="x").usage is not None
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="no").models.list()


def test_without_a_key_no_body_is_waited_for(opened: Open, keys: KeysFile):
    """Else strangers could take all the room there is for bodies, without sending their last byte."""
    key = keys.tenant("acme")
    router = opened(keys)
    for more in (b"Content-Length: 90000\r\n\r\nsome", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello", EXPECTED):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        with Wire(router.port) as wire:
            answer = wire.send(head + more).read()
            assert refusal(answer) == (401, "authentication_error")
            assert answer.headers["connection"] == "close" and wire.rest() == b""
    with Wire(router.port) as wire:
        known = b"Authorization: Bearer %b\r\n" % key.encode()
        assert wire.send(head + known + EXPECTED).read_head()[0] == 100


def test_field_M7_the_tenant_is_the_keys_whatever_is_sent(opened: Open, keys: KeysFile):
    """Salts, workers' quotas and metrics follow from it."""
    key = keys.tenant("acme")
    router = opened(keys)
    assert ask(router, key, {"x-prfaas-tenant": "other"}, user="other").status == 200
    assert router.backend.tenants.get(timeout=LIVENESS_S) == "acme"
    assert router.log().tenant == "acme"


def test_a_key_may_be_for_some_models_only(opened: Open, keys: KeysFile):
    """Others are neither listed nor served; whether they exist is not told."""
    key = keys.tenant("acme", models=[ECHO])
    router = opened(keys)
    assert ask(router, key).status == 200
    for model in (STUCK, "nobody's"):
        assert refusal(ask(router, key, model=model)) == (403, "permission_error")
    with Wire(router.port) as wire:
        listed = wire.ask("GET", "/v1/models", **bearer(key)).json["data"]
        assert [card["id"] for card in listed] == [ECHO]
        assert wire.ask("GET", f"/v1/models/{STUCK}", **bearer(key)).status == 403


def test_a_key_that_is_revoked_is_refused_without_a_restart(opened: Open, keys: KeysFile):
    """And a new one is good; a broken file changes nothing."""
    old = keys.tenant("acme")
    router = opened(keys)
    assert router.door.keys is not None
    assert ask(router, old).status == 200
    keys.path.write_text("{")
    router.call(router.door.keys.look())
    assert ask(router, old).status == 200
    keys.tree["keys"].clear()
    new = keys.tenant("acme")
    router.call(router.door.keys.look())
    assert (ask(router, old).status, ask(router, new).status) == (401, 200)


# A tenant's own limits.


def test_requests_per_minute(opened: Open, keys: KeysFile):
    """429 with the time until there is room again, and then there is; another tenant is not concerned."""
    key, other = keys.tenant("acme", requests_per_min=3), keys.tenant("other")
    router = opened(keys)
    assert [ask(router, key).status for _ in range(3)] == [200] * 3
    answer = ask(router, key)
    assert refusal(answer) == TOO_MANY
    assert 1 <= int(answer.headers["retry-after"]) <= 20
    assert ask(router, other).status == 200
    router.door.skipped_s += int(answer.headers["retry-after"])
    assert ask(router, key).status == 200
    assert ask(router, key).status == 429
    assert router.door.turned_away == {("acme", "requests"): 2}


def test_tokens_per_minute(opened: Open, keys: KeysFile):
    """What the prompt has and the answer may have is charged; what the answer did not need is given back."""
    key = keys.tenant("acme", tokens_per_min=60)
    router = opened(keys)
    assert ask(router, key, max_tokens=57).status == 200  # three of prompt, three of answer
    assert refusal(ask(router, key, max_tokens=57)) == TOO_MANY
    assert ask(router, key, max_tokens=50).status == 200
    answer = ask(router, key, max_tokens=50)
    router.door.skipped_s += int(answer.headers["retry-after"])
    assert ask(router, key, max_tokens=50).status == 200
    never = ask(router, key, max_tokens=58)
    assert refusal(never) == (400, "invalid_request_error") and never.json["error"]["code"] == "over_limit"
    assert "retry-after" not in never.headers


def test_what_the_cluster_failed_to_do_costs_no_tokens(opened: Open, keys: KeysFile):
    """While what a client broke off costs its prompt."""
    key = keys.tenant("acme", tokens_per_min=600)
    router = opened(keys)
    for _ in range(5):
        assert ask(router, key, model="full", max_tokens=500).status == 503
    with begun(router, key, model=STUCK, prompt=[70] * 400):
        running(router, 1)
    running(router, 0)
    assert refusal(ask(router, key, max_tokens=300)) == TOO_MANY
    assert ask(router, key, max_tokens=190).status == 200


def test_requests_at_once(opened: Open, keys: KeysFile):
    """Until one ends: here because its client has left."""
    key = keys.tenant("acme", max_concurrent=2)
    router = opened(keys)
    with begun(router, key, model=STUCK):
        with begun(router, key, model=STUCK):
            running(router, 2)
            answer = ask(router, key)
            assert refusal(answer) == TOO_MANY and int(answer.headers["retry-after"]) >= 1
        running(router, 1)
        assert ask(router, key).status == 200


def test_several_choices_are_one_request_and_several_at_once(opened: Open, keys: KeysFile):
    """All of them are charged, and what none of them needed is given back."""
    key = keys.tenant("acme", max_concurrent=3, requests_per_min=4, tokens_per_min=90)
    router = opened(keys)
    assert ask(router, key, n=3, max_tokens=27).status == 200  # 3 x (3 + 27), of which 3 x (3 + 3) are needed
    assert ask(router, key, n=2, max_tokens=33).status == 200
    assert refusal(ask(router, key, n=3, max_tokens=25)) == TOO_MANY
    assert ask(router, key, n=4, max_tokens=1).json["error"]["code"] == "over_limit"
    with begun(router, key, model=STUCK, n=2, max_tokens=1):
        running(router, 2)
        assert refusal(ask(router, key, n=2, max_tokens=1)) == TOO_MANY
    assert router.door.turned_away == {("acme", "tokens"): 1, ("acme", "size"): 1, ("acme", "concurrency"): 1}


def test_routers_share_the_limits(opened: Open, keys: KeysFile):
    """Each of two grants half; one alone, the whole."""
    key = keys.tenant("acme", requests_per_min=4)
    router = opened(keys)
    router.door.routers = 2
    assert [ask(router, key).status for _ in range(3)] == [200, 200, 429]
    router.door.routers = 1
    assert [ask(router, key).status for _ in range(3)] == [200, 200, 429]


# The queue that all share.


def test_who_finds_no_room_waits_for_it(opened: Open):
    """Its time in the queue is in the account of its time to the first token."""
    router = opened(admission=NARROW)
    with begun(router, model=STUCK) as first, Wire(router.port) as wire:
        running(router, 1)
        sent_s = time.monotonic()
        wire.send(request("POST", "/v1/completions", body(), x_prfaas_receipt="1"))
        waiting(router, 1)
        seen_s = time.monotonic()
        until(router, lambda: time.monotonic() - seen_s > 0.05)
        first.close()
        answer = wire.read()
        waited_s = time.monotonic() - sent_s
    assert answer.status == 200
    account = answer.json["prfaas_receipt"]["ttft_account"]
    assert 0.05 <= account["queue"] <= waited_s
    assert abs(account["unaccounted"]) < 0.05


def test_what_the_workers_have_no_place_for_waits_here(opened: Open):
    """Not refused by them: of their places each router has its part."""
    router = opened()
    router.door.places, router.door.routers = 3, 2
    with begun(router, model=STUCK):
        running(router, 1)
        with begun(router):
            waiting(router, 1)
    running(router, 0)
    waiting(router, 0)


def test_the_queue_is_bounded_in_requests(opened: Open):
    """One more is refused at once, and told to come back."""
    router = opened(admission=NARROW)
    with begun(router, model=STUCK), begun(router), begun(router):
        waiting(router, 2)
        answer = ask(router)
        assert refusal(answer) == BUSY and int(answer.headers["retry-after"]) >= 1
    waiting(router, 0)
    running(router, 0)
    assert ask(router).status == 200
    assert router.door.turned_away == {("", "queue"): 1}


def test_the_queue_is_bounded_in_tokens(opened: Open):
    router = opened(admission=NARROW)
    with begun(router, model=STUCK), begun(router, max_tokens=500):
        waiting(router, 1)
        assert refusal(ask(router, max_tokens=500)) == BUSY


def test_tokens_being_served_are_bounded(opened: Open):
    """There is room for more requests, but not for these; one alone may be larger."""
    router = opened(admission=AdmissionParams(max_running=100, max_running_tokens=1000))
    with begun(router, model=STUCK, max_tokens=1500):
        running(router, 1)
        with begun(router):
            waiting(router, 1)
    running(router, 0)
    assert ask(router).status == 200


def test_a_wait_is_bounded(opened: Open):
    router = opened(admission=AdmissionParams(max_running=1, max_wait_s=0.1))
    with begun(router, model=STUCK):
        running(router, 1)
        answer = ask(router)
        assert refusal(answer) == BUSY and int(answer.headers["retry-after"]) >= 1
        assert len(router.door.machine.turns) == 0
    assert router.door.turned_away == {("", "wait"): 1}


def test_a_flood_of_one_tenant_does_not_keep_others_out(opened: Open, keys: KeysFile):
    """Its requests were first. The others' turn comes by rounds, and in a full queue its last ones give way."""
    flood, other = keys.tenant("flood"), keys.tenant("other")
    router = opened(keys, AdmissionParams(max_running=1, max_queued_requests=6, quantum_tokens=10))
    with ExitStack() as stack:
        first = stack.enter_context(begun(router, flood, model=STUCK))
        running(router, 1)
        wires = []
        for number in range(6):
            wires.append(stack.enter_context(begun(router, flood)))
            waiting(router, number + 1)
        late = stack.enter_context(begun(router, other))
        turned = wires[-1].read()
        assert refusal(turned) == BUSY and int(turned.headers["retry-after"]) >= 1
        first.close()
        assert late.read().status == 200
        assert [wire.read().status for wire in wires[:-1]] == [200] * 5
    order = [router.backend.tenants.get(timeout=LIVENESS_S) for _ in range(7)]
    assert order.index("other") <= 2
    with pytest.raises(queue.Empty):
        router.backend.tenants.get_nowait()


def test_priorities_go_first(opened: Open, keys: KeysFile):
    """A caller may ask for less than its key's, not for more."""
    high, normal = keys.tenant("high", priority="high"), keys.tenant("normal")
    router = opened(keys, AdmissionParams(max_running=1, ageing_s=1e6))
    with ExitStack() as stack:
        first = stack.enter_context(begun(router, normal, model=STUCK))
        running(router, 1)
        wires = []
        asked = (("high", normal), ("low", high), ("high", high))
        for number, (priority, key) in enumerate(asked):
            wire = stack.enter_context(Wire(router.port))
            wire.send(request("POST", "/v1/completions", body(), **bearer(key, x_prfaas_priority=priority)))
            wires.append(wire)
            waiting(router, number + 1)
        first.close()
        assert [wire.read().status for wire in wires] == [200] * 3
    order = [router.backend.tenants.get(timeout=LIVENESS_S) for _ in range(4)]
    assert order == ["normal", "high", "normal", "high"]
    assert refusal(ask(router, high, {"x-prfaas-priority": "best"})) == (400, "invalid_request_error")


def test_field_D1_who_leaves_the_queue_leaves_nothing_behind(opened: Open, keys: KeysFile):
    """Not even a request less in its minute."""
    key, other = keys.tenant("acme", requests_per_min=2, tokens_per_min=2000, max_concurrent=2), keys.tenant("other")
    router = opened(keys, NARROW)
    with begun(router, other, model=STUCK):
        running(router, 1)
        for _ in range(5):
            with begun(router, key, max_tokens=900):
                waiting(router, 1)
            waiting(router, 0)
    running(router, 0)
    assert [ask(router, key).status for _ in range(3)] == [200, 200, 429]


# Deadlines.


def test_a_deadline_that_passes_while_the_model_works_ends_the_request(opened: Open):
    """504, and nobody works on for it."""
    router = opened()
    answer = ask(router, headers={"x-prfaas-ttft-deadline-ms": "100"}, model=STUCK)
    assert refusal(answer) == LATE
    running(router, 0)
    assert router.backend.running == 0
    assert ask(router, headers={"x-prfaas-ttft-deadline-ms": "20000"}).status == 200


def test_a_deadline_ends_the_wait(opened: Open, keys: KeysFile):
    """The tenant's, if the request has none of its own; what the model is predicted to take counts too."""
    key = keys.tenant("acme", ttft_deadline_ms=100)
    router = opened(keys, NARROW)
    patient = {"x-prfaas-ttft-deadline-ms": "100000"}
    with Wire(router.port) as wire:
        wire.send(request("POST", "/v1/completions", body(model=STUCK), **bearer(key, **patient)))
        running(router, 1)
        assert refusal(ask(router, key)) == LATE
        router.door.predicted_s = 99.9
        assert refusal(ask(router, key, patient)) == LATE
    running(router, 0)
    assert set(router.door.turned_away) == {("acme", "deadline")}


def test_a_deadline_that_cannot_be_kept_is_refused_at_once(opened: Open):
    """By what the router predicts, before any worker hears of it, or by the pace of the queue."""
    router = opened(admission=AdmissionParams(max_running=1))
    deadline = {"x-prfaas-ttft-deadline-ms": "5000"}
    router.door.predicted_s = 6.0
    asked_s = time.monotonic()
    assert refusal(ask(router, headers=deadline)) == LATE
    assert time.monotonic() - asked_s < 5 and router.backend.tenants.empty()
    router.door.predicted_s = 0.0
    with begun(router, model=STUCK):
        running(router, 1)
        router.door.skipped_s += 60
    running(router, 0)
    with begun(router, model=STUCK):
        running(router, 1)
        asked_s = time.monotonic()
        assert refusal(ask(router, headers=deadline)) == LATE
        assert refusal(ask(router)) == BUSY, "one took a minute: so long nobody waits"
        assert time.monotonic() - asked_s < 5


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "9" * 15, ""])
def test_a_deadline_is_a_whole_number_of_milliseconds(opened: Open, value: str):
    answer = ask(opened(), headers={"x-prfaas-ttft-deadline-ms": value})
    assert refusal(answer) == (400, "invalid_request_error")
    assert answer.json["error"]["param"] == "x-prfaas-ttft-deadline-ms"


def test_after_any_mixture_everything_is_given_back(opened: Open, keys: KeysFile):
    """Clients that leave, answers that break, refusals and deadlines: the fixture checks the machine at the end."""
    key = keys.tenant("acme", tokens_per_min=100_000, max_concurrent=6)
    router = opened(keys, AdmissionParams(max_running=3, max_queued_requests=3))
    with ExitStack() as stack:
        for number in range(30):
            model = (ECHO, STUCK, BREAKS, "full", "buggy", ECHO)[number % 6]
            wire = stack.enter_context(begun(router, key, model=model, stream=bool(number % 2)))
            if number % 5 == 4:
                wire.close()
    running(router, 0)
    waiting(router, 0)
    assert ask(router, key).status == 200


def test_a_request_has_the_weight_of_its_tenant(opened: Open, keys: KeysFile):
    """Lines between regions are shared by it, too; and its trace goes on where the client began it."""
    router, traceparent = opened(keys), f"00-{'a' * 32}-{'b' * 16}-01"
    key = keys.tenant("acme", weight=2.5)
    router.call(router.door.keys.look())
    assert ask(router, key, {"traceparent": traceparent}).status == 200
    [asked] = router.backend.requests
    assert (asked.tenant, asked.weight, asked.traceparent) == ("acme", 2.5, traceparent)
