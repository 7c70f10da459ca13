"""The request log: what is in a line, and what happens to the file."""

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from prfaas.cluster import NodeId
from prfaas.errors import ConfigError
from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.kvcache.hashing import KEY_BYTES, unit_keys
from prfaas.request import (
    TTFT_TERMS,
    AttemptId,
    FinishReason,
    Path,
    Reason,
    Request,
    RequestId,
    Route,
    Sampling,
    TtftAccount,
)
from prfaas.tokenizer.text import pack
from services.router import request_log
from services.router.openai.record import RequestLog
from services.router.request_log import RequestLogFile

LIVENESS_S = 20.0
ROUTE = Route(
    prefill=NodeId("p0"),
    decode=NodeId("d0"),
    path=Path.REMOTE,
    reason=Reason.LONG_PROMPT,
    uncached_tokens=199,
    transfer_tokens=199,
    threshold_tokens=100,
)
REPORT = PrefillReport(queue_s=0.0, compute_s=1.0, exposed_s=0.0, prefill_tokens=71, kv_bytes=1, cached_tokens=128)


def salt(tenant: str) -> bytes:
    return b"salt of " + tenant.encode()


def request(ids: list[int], tenant: str = "acme") -> Request:
    return Request(id=RequestId("r"), model="m", prompt=pack(ids), sampling=Sampling(max_tokens=9), tenant=tenant)


def record(*requests: Request, request_id: str = "mine") -> RequestLog:
    stories = [
        Story(
            attempts=[Attempt(AttemptId("a"), ROUTE, Ending.DONE)],
            prefill=REPORT,
            output_tokens=3,
            finish=FinishReason.LENGTH,
        )
        for _ in requests
    ]
    return RequestLog(
        route="chat",
        request_id=request_id,
        status=200,
        tenant="acme",
        model="m",
        duration_s=2.0,
        output_tokens=3 * len(requests),
        ttft_s=1.0,
        account=TtftAccount(dict.fromkeys(TTFT_TERMS, 0.1), 1.0),
        prompt_tokens=sum(each.prompt_tokens for each in requests),
        story=stories[0],
        siblings=tuple(stories[1:]),
        requests=requests,
    )


@pytest.fixture
def path(tmp_path: FilePath) -> FilePath:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def file(path: FilePath) -> Iterator[RequestLogFile]:
    log = RequestLogFile(path, salt, wall=lambda: 1_000_000.0)
    yield log
    log.close()


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def lines(path: FilePath) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_tells_what_came_and_what_became_of_it(file: RequestLogFile, path: FilePath):
    """When it came, from whom, how long it was, where it went, and where its time went; no token of it."""
    file.put(record(request([70_123] * 200)))
    file.close()
    [line] = lines(path)
    assert (line["time"], line["duration_s"], line["ttft_s"]) == (999_998.0, 2.0, 1.0)
    assert (line["request_id"], line["tenant"], line["model"], line["endpoint"]) == ("mine", "acme", "m", "chat")
    assert (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) == (200, 3, 128)
    assert (line["path"], line["reason"], line["prefill"], line["decode"]) == ("remote", "long_prompt", "p0", "d0")
    assert (line["status"], line["outcome"], line["error"], line["finish"]) == (200, "ok", None, "length")
    assert sum(line["account"].values()) == pytest.approx(line["ttft_s"])
    assert set(line["account"]) == {*TTFT_TERMS, "unaccounted"}
    assert "70123" not in path.read_text()
    assert path.stat().st_mode & 0o007 == 0


def test_prompts_that_begin_the_same_have_names_that_do(file: RequestLogFile, path: FilePath):
    """Eight bytes for each 64 tokens, which also stand for all before them; each tenant has names of its own, and they
    are not those that the cache knows."""
    same, other = list(range(128)), list(range(64)) + [9] * 64
    for each in (request([*same, 1, 2]), request([*same, 3]), request(other), request(same, tenant="else")):
        file.put(record(each))
    file.close()
    names = [base64.b64decode(line["prefix"]) for line in lines(path)]
    assert names[0] == names[1] and len(names[0]) == 2 * 8
    assert names[2][:8] == names[0][:8] and names[2][8:] != names[0][8:]
    assert not {names[3][:8], names[3][8:]} & {names[0][:8], names[0][8:]}
    for namespace in ("", "m"):
        keys = unit_keys(pack(same), namespace, salt("acme"))
        assert keys[:8] != names[0][:8] and keys[KEY_BYTES : KEY_BYTES + 8] != names[0][8:]


def test_each_sequence_has_a_line(file: RequestLogFile, path: FilePath):
    """Each is prefilled and decoded by itself; the first token's time is the request's and is told once."""
    file.put(record(request([1] * 64), request([2] * 70)))
    file.close()
    first, second = lines(path)
    assert [(line["sequence"], line["sequences"], line["output_tokens"]) for line in (first, second)] == [
        (0, 2, 3),
        (1, 2, 3),
    ]
    assert (first["prompt_tokens"], second["prompt_tokens"], second["ttft_s"], second["account"]) == (
        64,
        70,
        None,
        None,
    )


def test_a_request_that_was_refused_has_a_line(file: RequestLogFile, path: FilePath):
    """With what is known of it."""
    file.put(RequestLog(route="chat", request_id="no", status=429, error="Overloaded", tenant="acme"))
    file.close()
    [line] = lines(path)
    assert (line["outcome"], line["prompt_tokens"], line["path"], line["prefix"]) == ("overloaded", None, None, "")


def test_only_completions_are_logged(file: RequestLogFile, path: FilePath):
    """Everything is passed on; probes and scrapes are no requests."""
    seen: list[str] = []
    observe = file.besides(lambda each: seen.append(each.route))
    for route in ("metrics", "chat", "ready"):
        observe(RequestLog(route=route, status=200))
    file.close()
    assert seen == ["metrics", "chat", "ready"]
    assert [line["endpoint"] for line in lines(path)] == ["chat"]


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_the_file_may_be_moved_away(file: RequestLogFile, path: FilePath, how: str):
    """As logrotate does it, with a new file made in its place or none: what comes afterwards is under the name."""
    file.put(record(request([1]), request_id="before"))
    eventually(lambda: file.written == 1)
    if how == "removed":
        path.unlink()
    else:
        path.rename(path.with_suffix(".1"))
    if how == "replaced":
        path.touch()
    file.put(record(request([1]), request_id="after"))
    eventually(lambda: file.written == 2)
    assert [line["request_id"] for line in lines(path)] == ["after"]
    if how != "removed":
        assert [line["request_id"] for line in lines(path.with_suffix(".1"))] == ["before"]


def test_several_processes_may_write_to_one_file(file: RequestLogFile, path: FilePath):
    """Lines are added whole, at the end."""
    other = RequestLogFile(path, salt)
    for number in range(50):
        for each in (file, other):
            each.put(record(request([number] * 64), request_id=str(number)))
    file.close()
    other.close()
    assert sorted(int(line["request_id"]) for line in lines(path)) == sorted([*range(50)] * 2)


def test_a_disk_that_stalls_costs_lines_and_nothing_else(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch):
    """Nobody reads the pipe, so that writing to it stands still: what waits is bounded, the rest is dropped and
    counted, and neither a request nor the end of the process waits."""
    monkeypatch.setattr(request_log, "MAX_WAITING", 100)
    monkeypatch.setattr(request_log, "CLOSE_S", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    file = RequestLogFile(fifo, salt)
    slowest_s = 0.0
    for number in range(2000):
        begun_s = time.monotonic()
        file.put(record(request([number] * 64)))
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
    file.close()
    assert file.dropped > 0 and len(file._waiting) <= 100
    assert file.written + file.dropped < 2000
    assert slowest_s < LIVENESS_S
    os.close(reader)  # the writer's thread fails, and ends


def test_what_waits_is_bounded_in_bytes(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch):
    """Prompts are long, and wait to be hashed."""
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 1000)
    file = RequestLogFile(tmp_path / "log", salt)
    file.put(record(request([1] * 251)))
    file.close()
    assert (file.written, file.dropped) == (0, 1)


def test_a_full_disk_is_counted_and_not_fatal(capsys: pytest.CaptureFixture[str]):
    """It is said once, not with every line."""
    file = RequestLogFile(FilePath("/dev/full"), salt)
    for _ in range(3):
        failed = file.failed
        file.put(record(request([1])))
        eventually(lambda failed=failed: file.failed > failed)
    file.close()
    assert (file.written, file.failed) == (0, 3)
    assert capsys.readouterr().out.count("request log cannot be written") <= 1


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: FilePath):
    with pytest.raises(ConfigError, match=r"router\.request_log"):
        RequestLogFile(tmp_path / "no" / "such" / "file", salt)
