"""Logs of a process: one line per event on stderr, as JSON or for people to read.

A line about a request has its `request_id`, and its `trace_id` if it has a trace. Prompts, answers and secrets never
reach a line: fields with such names are masked and bytes are shown as their length, whoever passes them.
"""

import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

LogFormat = Literal["json", "text"]

MASKED = "***"
_PRIVATE = frozenset(
    {"prompt", "messages", "text", "content", "completion", "token_ids", "secret", "api_key", "authorization"}
)
_BYTES = (bytes, bytearray, memoryview)
_ENCODER = json.JSONEncoder(default=str)


def configure(log_format: LogFormat, level: str = "info") -> None:
    """Call once, before the first line. Lines of libraries that use `logging` take the same way, from warnings up."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _Stamp(),
        structlog.processors.StackInfoRenderer(),
        _mask,
    ]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderer = _renderer(log_format)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


def _renderer(log_format: LogFormat) -> list[structlog.typing.Processor]:
    match log_format:
        case "json":
            return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_json)]
        case "text":
            return [
                structlog.dev.ConsoleRenderer(
                    colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
                )
            ]


def _json(event: MutableMapping[str, Any], **_: Any) -> str:
    return _ENCODER.encode(event)


class _Stamp:
    """The time in UTC, as ISO 8601 has it. What stays the same for a second is made once a second: there is a line for
    every request."""

    def __init__(self) -> None:
        self._second, self._shown = 0, ""

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        second, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        event["timestamp"] = f"{self._shown}.{microseconds:06d}Z"
        return event


def _mask(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if name in _PRIVATE:
            event[name] = MASKED
        elif isinstance(value, _BYTES):
            event[name] = f"<{len(value)} bytes>"
    return event
