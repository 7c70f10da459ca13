"""The request log: a file with one line of JSON for each sequence of a request that has ended, and of each request that
never came to any. `prfaas sim run --trace` replays it.

There is no prompt and no answer in it. What two prompts begin with in common shows in `prefix`: 8 bytes, in base64, for
each 64 tokens, which name these and all before them. They are keyed by the tenant's salt and are not the cache's own
keys: who has the file cannot find out by them whether somebody asked something.

Nothing here makes a request wait. A thread writes; what it has no room for is dropped and counted. Each batch of lines
goes into whatever file has the name by then, so that it may be moved away at any time, and several processes may
write to the same one.
"""

import base64
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec
import structlog

from prfaas.errors import ConfigError
from prfaas.flows.story import Story
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.observe.tracing import trace_id_of
from prfaas.request import TOKEN_BYTES, Request
from services.router.openai.record import Observe, RequestLog
from services.router.request_counts import COMPLETIONS, outcome

#: What waits to be written: lines, and bytes of their prompts.
MAX_WAITING, MAX_WAITING_BYTES = 1 << 14, 256 << 20
#: Lines in one write.
BATCH = 256
UNIT_BYTES = HASH_UNIT_TOKENS * TOKEN_BYTES
#: Of the name of a prefix: two of a billion have the same one by chance about once in forty logs.
NAME_BYTES = 8
#: Names made before others may go on.
BREATH = 128
#: How long the last lines may take.
CLOSE_S = 2.0
MODE = 0o640

log = structlog.get_logger()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is not known is null. `time` is when the request came, in Unix seconds. `ttft_s` and the `account` of it are
    the request's, and are given with its first sequence."""

    time: float
    request_id: str
    trace_id: str | None
    sequence: int
    sequences: int
    endpoint: str
    tenant: str
    model: str | None
    stream: bool
    status: int
    outcome: str
    error: str | None
    finish: str | None
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    path: str | None
    reason: str | None
    prefill: str | None
    decode: str | None
    attempts: int
    ttft_s: float | None
    account: Mapping[str, float] | None
    duration_s: float
    prefix: str = ""


class RequestLogFile:
    """`salt` is a tenant's. Raises ConfigError when the file cannot be opened from the start."""

    def __init__(self, path: Path, salt: Callable[[str], bytes], wall: Callable[[], float] = time.time) -> None:
        self._path, self._salt, self._wall = path, salt, wall
        self.written = self.dropped = self.failed = 0
        self._waiting: deque[tuple[Line, Request | None]] = deque()
        self._put_bytes = self._taken_bytes = 0
        self._wake, self._closing, self._torn, self._complained = threading.Event(), False, False, False
        try:
            self._file, self._mark = _open(path)
        except OSError as error:
            raise ConfigError("router.request_log", f"{path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._write_all, name="request log", daemon=True)
        self._thread.start()

    def besides(self, observe: Observe) -> Observe:
        """Log completions, and tell `observe` of everything."""

        def ended(record: RequestLog) -> None:
            if record.route in COMPLETIONS:
                self.put(record)
            observe(record)

        return ended

    def put(self, record: RequestLog) -> None:
        for line, request in _lines(record, self._wall()):
            nbytes = len(request.prompt) if request is not None else 0
            if (
                len(self._waiting) >= MAX_WAITING
                or self._put_bytes - self._taken_bytes + nbytes > MAX_WAITING_BYTES
                or self._closing
            ):
                self.dropped += 1
                continue
            self._put_bytes += nbytes
            self._waiting.append((line, request))
        self._wake.set()

    def close(self) -> None:
        """Write what waits, if that does not take long."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        while not (self._closing and not self._waiting):
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                lines = [self._encoded(line, request) for line, request in batch]
                self._taken_bytes += sum(len(request.prompt) for _, request in batch if request is not None)
                self._write(lines)
        os.close(self._file)

    def _encoded(self, line: Line, request: Request | None) -> bytes:
        if request is not None:
            line = msgspec.structs.replace(line, prefix=prefix_of(request, self._salt(request.tenant)))
        return msgspec.json.encode(line) + b"\n"

    def _write(self, lines: Sequence[bytes]) -> None:
        # Whole lines in one call: other processes append to the file as well.
        left = memoryview((b"\n" if self._torn else b"") + b"".join(lines))
        try:
            self._follow_name()
            while left:
                left = left[os.write(self._file, left) :]
                self._torn = True
            self._torn, self._complained = False, False
            self.written += len(lines)
        except OSError as error:
            self.failed += len(lines)
            if not self._complained:
                self._complained = True
                log.error("the request log cannot be written", file=str(self._path), error=error.strerror)

    def _follow_name(self) -> None:
        """A file that was moved away is left to whoever did it."""
        if _mark(self._path) != self._mark:
            file, mark = _open(self._path)
            os.close(self._file)
            self._file, self._mark, self._torn = file, mark, False


def prefix_of(request: Request, salt: bytes) -> str:
    """A name for each 64 tokens and all before them. Takes about a microsecond for each, and lets the event loop's
    thread go on meanwhile."""
    prompt, names = request.prompt, bytearray()
    chain = hashlib.blake2b(request.model.encode(), digest_size=NAME_BYTES, key=salt, person=b"request log")
    for number, start in enumerate(range(0, len(prompt) - UNIT_BYTES + 1, UNIT_BYTES), 1):
        chain.update(prompt[start : start + UNIT_BYTES])
        names += chain.copy().digest()
        if number % BREATH == 0:
            time.sleep(0)
    return base64.b64encode(names).decode()


def _lines(record: RequestLog, now_s: float) -> Sequence[tuple[Line, Request | None]]:
    count = max(1, len(record.stories))
    pairs = zip_longest(record.stories or (None,), record.requests)
    return [(_line(record, now_s, at, count, story, request), request) for at, (story, request) in enumerate(pairs)]


def _line(
    record: RequestLog, now_s: float, sequence: int, sequences: int, story: Story | None, request: Request | None
) -> Line:
    route, report = (story.route, story.prefill) if story is not None else (None, None)
    first = sequence == 0
    return Line(
        time=now_s - record.duration_s,
        request_id=record.request_id,
        trace_id=trace_id_of(record.traceparent) if record.traceparent else None,
        sequence=sequence,
        sequences=sequences,
        endpoint=record.route,
        tenant=record.tenant,
        model=record.model,
        stream=record.stream,
        status=record.status,
        outcome=outcome(record).value,
        error=record.error,
        finish=story.finish.value if story is not None and story.finish is not None else None,
        prompt_tokens=request.prompt_tokens if request is not None else None,
        output_tokens=story.output_tokens if story is not None and sequences > 1 else record.output_tokens,
        cached_tokens=report.cached_tokens if report is not None else None,
        path=route.path.value if route is not None else None,
        reason=route.reason.value if route is not None else None,
        prefill=route.prefill if route is not None else None,
        decode=route.decode if route is not None else None,
        attempts=len(story.attempts) if story is not None else 0,
        ttft_s=record.ttft_s if first else None,
        account=record.account.shown() if first and record.account is not None else None,
        duration_s=record.duration_s,
    )


def _open(path: Path) -> tuple[int, tuple[int, int]]:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    found = os.fstat(file)
    return file, (found.st_dev, found.st_ino)


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
