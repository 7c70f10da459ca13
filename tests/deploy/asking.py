"""Requests to the routers as a balancer makes them: each on a connection of its own, and where nobody listens at one
router the next is tried. Whatever else goes wrong is an error.

`Asking` keeps so many requests going until it is told to stop, and compares every token with the reference.
"""

import http.client
import itertools
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.reference import Alone, token_ids

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Got:
    token_ids: list[int]
    receipt: dict[str, Any]
    #: When it was sent and when it was whole.
    sent: float
    ended: float


def complete(endpoints: Sequence[str], model: str, ids: Sequence[int], max_tokens: int) -> Got:
    """A streamed greedy completion. Raises whatever a client would see."""
    sent = time.monotonic()
    body = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    connection = _connected(endpoints)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close", "x-prfaas-receipt": "1"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == http.client.OK, f"{response.status}: {response.read().decode()}"
        tokens, receipt, ended = [], {}, False
        for line in response:
            content = line.removeprefix(b"data: ").strip()
            ended |= content == b"[DONE]"
            if not line.startswith(b"data: ") or ended:
                continue
            event = json.loads(content)
            assert "error" not in event, event
            receipt = event.get("prfaas_receipt") or receipt
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
        assert ended, "the stream broke off"
        return Got(tokens, receipt, sent, time.monotonic())
    finally:
        connection.close()


def _connected(endpoints: Sequence[str]) -> http.client.HTTPConnection:
    for number, endpoint in enumerate(endpoints, start=1):
        parts = urllib.parse.urlsplit(endpoint)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            connection.connect()
        except ConnectionRefusedError:
            if number == len(endpoints):
                raise
        else:
            return connection
    raise AssertionError("no endpoint")


@dataclass
class Asking:
    """`lengths` of prompts are taken in turn; no prompt comes twice, so that no cache answers."""

    endpoints: Sequence[str]
    model: str
    alone: Alone
    lengths: Sequence[int]
    first_seed: int
    max_tokens: int = 16
    done: list[tuple[int, Got]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def running(self, clients: int = 2) -> Iterator["Asking"]:
        """While inside, so many clients ask one request after the other. At the end all are answered."""
        stop, numbers = threading.Event(), itertools.count()
        threads = [
            threading.Thread(target=self._client, args=(stop, numbers), name=f"client-{number}")
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads), "a request hangs"

    def _client(self, stop: threading.Event, numbers: Iterator[int]) -> None:
        while not stop.is_set():
            number = next(numbers)
            turn = number % len(self.endpoints)
            try:
                got = complete(
                    [*self.endpoints[turn:], *self.endpoints[:turn]], self.model, self._prompt(number), self.max_tokens
                )
            except Exception as error:  # a test wants to see all of them
                self.failed.append(f"request {number}: {error!r}")
            else:
                self.done.append((number, got))

    def _prompt(self, number: int) -> list[int]:
        return token_ids(self.lengths[number % len(self.lengths)], seed=self.first_seed + number)

    def until(self, condition: Callable[["Got"], bool], limit_s: float, what: str) -> Got:
        """The first answer that was sent from now on and is like that."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit_s:
            for _, got in list(self.done):
                if got.sent >= begun and condition(got):
                    return got
            time.sleep(0.1)
        raise AssertionError(f"not within {limit_s} s: {what}; failed: {self.failed}")

    def check(self) -> None:
        """No request failed, and every token is the reference's."""
        assert not self.failed, self.failed
        assert self.done
        for number, got in self.done:
            assert got.token_ids == self.alone.answer(self._prompt(number), self.max_tokens), f"request {number}"
