"""Logs of a process: one line per event on stderr, as JSON or for people to read.

Lines written while a request is bound carry its `request_id` and `trace_id`. Prompts, answers and secrets never reach a
line: fields with such names are masked and bytes are shown as their length, whoever passes them.
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal

import structlog

LogFormat = Literal["json", "text"]

MASKED = "***"
_PRIVATE = frozenset(
    {"prompt", "messages", "text", "content", "completion", "token_ids", "secret", "api_key", "authorization"}
)


def configure(log_format: LogFormat, level: str = "info") -> None:
    """Call once, before the first line. Lines of libraries that use `logging` take the same way, from warnings up."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
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


@contextmanager
def request_context(request_id: str, trace_id: str | None = None) -> Iterator[None]:
    """Every line written inside, by this task and those it starts, carries the ids."""
    ids = {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {})
    with structlog.contextvars.bound_contextvars(**ids):
        yield


def _renderer(log_format: LogFormat) -> list[structlog.typing.Processor]:
    match log_format:
        case "json":
            return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        case "text":
            return [
                structlog.dev.ConsoleRenderer(
                    colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
                )
            ]


def _mask(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if name in _PRIVATE:
            event[name] = MASKED
        elif isinstance(value, bytes | bytearray | memoryview):
            event[name] = f"<{len(value)} bytes>"
    return event
