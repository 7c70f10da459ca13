"""Request traces, those that others have published and our own request log, as they come: one reader per format, all
giving `Traced` in time order.

Times start at 0. `blocks` are ids of the prompt's blocks, where a trace has them: equal ids at equal places mean equal
prefixes. What does not fit its format is an error that names file and line.
"""

import base64
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

from prfaas.errors import ConfigError
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.sim import servegen


class TraceFormat(Enum):
    """Of the file of requests, or for SERVEGEN of the folder (or tar of one) with its clients."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    SERVEGEN = "servegen"
    BURSTGPT = "burstgpt"
    BAILIAN = "bailian"
    #: What our own router writes.
    REQUEST_LOG = "request_log"


class Traced(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


#: Tokens in a block of a trace that has blocks.
BLOCK_TOKENS: Mapping[TraceFormat, int] = {
    TraceFormat.MOONCAKE: 512,
    TraceFormat.BAILIAN: 16,
    TraceFormat.REQUEST_LOG: HASH_UNIT_TOKENS,
}
#: Of the name of a block in a request log.
_NAME_BYTES = 8

T = TypeVar("T")

_SECONDS_PER_DAY = 86400


def read(path: Path, trace_format: TraceFormat, seed: int) -> list[Traced]:
    """All requests of a trace. `seed` matters where the format describes a process rather than requests."""
    match trace_format:
        case TraceFormat.SERVEGEN:
            requests = [Traced(*request) for request in servegen.requests(path, seed)]
        case TraceFormat.MOONCAKE | TraceFormat.BAILIAN:
            to_s = 1e-3 if trace_format is TraceFormat.MOONCAKE else 1.0
            requests = list(_lines(path, lambda line: _of_json(line, to_s)))
        case TraceFormat.REQUEST_LOG:
            requests = list(_lines(path, _of_request_log))
        case TraceFormat.AZURE:
            requests = list(_rows(path, _of_azure))
        case TraceFormat.BURSTGPT:
            requests = list(_rows(path, _of_burstgpt))
    kept = sorted(request for request in requests if request.prompt_tokens > 0 and request.output_tokens > 0)
    if not kept:
        raise ConfigError(str(path), "no requests in this trace")
    start_s = kept[0].at_s
    return [request._replace(at_s=request.at_s - start_s) for request in kept]


def _of_json(line: str, to_s: float) -> Traced:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    blocks = tuple(map(int, fields.get("hash_ids", ())))
    return Traced(float(fields["timestamp"]) * to_s, int(fields["input_length"]), int(fields["output_length"]), blocks)


def _of_request_log(line: str) -> Traced:
    """Of requests that were refused, or failed before their first token, there are no tokens on one side or both."""
    fields = json.loads(line)
    names = base64.b64decode(fields["prefix"], validate=True)
    blocks = tuple(int.from_bytes(names[at : at + _NAME_BYTES], "big") for at in range(0, len(names), _NAME_BYTES))
    prompt_tokens, output_tokens = int(fields["prompt_tokens"] or 0), int(fields["output_tokens"])
    return Traced(float(fields["time"]), prompt_tokens, output_tokens, blocks)


def _of_azure(row: Mapping[str, str]) -> Traced:
    return Traced(seconds_of(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _of_burstgpt(row: Mapping[str, str]) -> Traced:
    """Failed requests have no response tokens."""
    return Traced(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def seconds_of(stamp: str) -> float:
    """Of `YYYY-MM-DD hh:mm:ss.fraction`, with or without an offset of zero, since 1970."""
    day, _, clock = stamp.strip().removesuffix("Z").removesuffix("+00:00").partition(" ")
    year, month, date = map(int, day.split("-"))
    hours, minutes, seconds = clock.split(":")
    # Days since 1970 of a date in the Gregorian calendar, with years that begin in March.
    year, shifted = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * shifted + 2) // 5 + date - 1 - 719468
    return days * _SECONDS_PER_DAY + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _lines(path: Path, parse: Callable[[str], Traced]) -> Iterator[Traced]:
    with _opened(path) as file:
        yield from _parsed(path, ((line, number) for number, line in enumerate(file, 1) if line.strip()), parse)


def _rows(path: Path, parse: Callable[[Mapping[str, str]], Traced]) -> Iterator[Traced]:
    with _opened(path) as file:
        reader = csv.DictReader(file)
        yield from _parsed(path, ((row, reader.line_num) for row in reader), parse)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(str(path), f"not a text of this trace format: {error}") from error


def _parsed(path: Path, lines: Iterable[tuple[T, int]], parse: Callable[[T], Traced]) -> Iterator[Traced]:
    for line, number in lines:
        try:
            request = parse(line)
            if not math.isfinite(request.at_s):
                raise ValueError(f"it comes at {request.at_s}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}", f"not a request of this trace format: {error!r}") from error
        yield request
