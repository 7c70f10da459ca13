"""Commands that ask a server which answers otherwise than it should: one line that says so, and an exit code."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from services import http_client
from services.cli import main

LIVENESS_S = 60
Answer = Callable[[socket.socket, bytes], None]


@contextlib.contextmanager
def server(answer: Answer) -> Iterator[str]:
    """Hands each connection with the head of its request to `answer`, and closes it then."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if head := connection.recv(65536):
                answer(connection, head)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def page(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def always(answer: bytes) -> Answer:
    return lambda connection, head: connection.sendall(answer)


def models_and(answer: Answer) -> Answer:
    """A server of one model."""
    models = page(b'{"data": [{"id": "m"}]}')
    return lambda connection, head: connection.sendall(models) if b"/models" in head else answer(connection, head)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


STREAM = event("a") + event("b") + b"data: [DONE]\n\n"


def ended(*arguments: str, code: int) -> str:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0 nonsense\r\n\r\n",
        b"",
        page(b"\xff\xfe<html>"),
        page(b"[1]"),
        page(b'{"a": 1}'),
        page(b"null"),
        page(b'"text"'),
        page(b'{"error": "oops"}', "500 Oops"),
        page(b'["error"]', "401 No"),
        page(b"", "301 Moved"),
    ],
)
def test_what_is_no_admin_api_is_named(answer: bytes):
    with server(always(answer)) as url:
        told = ended("status", "--admin", url, "--key", "k", code=1)
        assert url in told and "answer" in told
        assert "answer" in ended("bench", "--endpoint", url, code=1)
        if not answer.startswith(b"HTTP/1.1 200"):
            assert "answer" in ended("workers", "--admin", url, "--key", "k", code=1)
            assert url in ended("demo", "--endpoint", url, code=1)


def test_a_demo_says_why_it_has_no_model():
    """An endpoint that asks for a key has not said that there is none."""
    with server(always(page(b'{"error": {"message": "An API key is needed"}}', "401 No"))) as url:
        assert "401" in (told := ended("demo", "--endpoint", url, code=1)) and "An API key is needed" in told
    with server(always(page(b'{"data": []}'))) as url:
        assert "serves no model" in ended("demo", "--endpoint", url, code=1)


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch):
    """In time and in bytes, also of a server that goes on and on."""

    def endless(piece: bytes) -> Answer:
        def answer(connection: socket.socket, head: bytes) -> None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(piece)
                stop.wait(0.01 if len(piece) == 1 else 0)

        return answer

    stop = threading.Event()
    with server(endless(b"x")) as url, pytest.raises(TimeoutError):
        http_client.ask("GET", url, timeout_s=0.3)
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1 << 20)
    with server(endless(b"x" * 65536)) as url, pytest.raises(OSError, match="larger"):
        http_client.ask("GET", url)


def test_a_stream_may_end_with_its_connection():
    """Some servers give no length and send no chunks."""
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + STREAM
    with server(models_and(always(whole))) as url:
        told = json.loads(CliRunner().invoke(main, ["bench", "--endpoint", url, "--requests", "2", "--json"]).stdout)
    [run] = told["runs"]
    assert (run["completed"], run["output_tokens"], run["failed"]) == (2, 4, {})


def test_a_stream_that_is_cut_is_a_failure():
    """One with a length that does not come."""
    with server(models_and(always(page(STREAM)[:-5]))) as url:
        assert "connection" in ended("bench", "--endpoint", url, "--requests", "1", code=1)


def test_an_answer_may_come_after_a_continue():
    def answer(connection: socket.socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        threading.Event().wait(0.1)
        connection.sendall(page(STREAM))

    with server(models_and(answer)) as url:
        ended("bench", "--endpoint", url, "--requests", "1", code=0)


def test_what_a_server_says_of_an_error_is_one_line():
    """With nothing in it that a terminal would obey."""
    with server(models_and(always(page(b"line\nand \x1b[31mred", "500 Oops")))) as url:
        told = ended("bench", "--endpoint", url, "--requests", "1", code=1)
    assert "500: line and  [31mred" in told and "\x1b" not in told


def test_no_figures_are_lost_with_the_place_for_the_page(tmp_path: Path):
    with server(models_and(always(page(STREAM)))) as url:
        told = ended("bench", "--endpoint", url, "--requests", "1", "--report", "/dev/full", code=1)
    assert "TTFT" in told and "--report /dev/full: No space left on device" in told


def test_rates_that_cannot_be_measured_are_refused_before_anything_is_sent():
    """A sweep that ended at its second rate would lose the first."""
    with server(models_and(lambda connection, head: asked.append(head))) as url:
        asked: list[bytes] = []
        for more in (("--rate", "5", "--rate", "1e-6"), ("--rate", "1e9"), ("--requests", "1", "--warm-up-s", "1e6")):
            assert "--requests" in (told := ended("bench", "--endpoint", url, *more, code=2)) or "--duration-s" in told
    assert not asked


def test_an_interrupt_keeps_the_runs_that_were_whole():
    """Ctrl-C in the second run of a sweep: the first one's figures, and exit code 1."""
    second = threading.Event()

    def answer(connection: socket.socket, head: bytes) -> None:
        if len(asked) >= 2:
            second.set()
            threading.Event().wait(LIVENESS_S)
        asked.append(head)
        connection.sendall(page(STREAM))

    asked: list[bytes] = []
    with server(models_and(answer)) as url:
        command = [sys.executable, "-m", "services.cli", "bench", "--endpoint", url, "--requests", "2"]
        sweep = [*command, "--rate", "50", "--rate", "51", "--json"]
        process = subprocess.Popen(sweep, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
        try:
            assert second.wait(LIVENESS_S)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIVENESS_S)
        finally:
            process.kill()
    assert process.returncode == 1 and b"stopped" in err and b"Traceback" not in err
    assert [run["rate_per_s"] for run in json.loads(out)["runs"]] == [50]
