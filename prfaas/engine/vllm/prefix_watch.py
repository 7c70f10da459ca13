"""Tells the node what becomes of its vLLM server's prefix cache, as the server publishes it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from importlib.util import find_spec

import msgspec
import structlog

from prfaas.cluster import OWN_PREFIXES, RESUMES_ANYWHERE
from prfaas.engine.messages import Prefixes
from prfaas.engine.vllm.kv_events import Endpoints, decode
from prfaas.engine.vllm.prefix_book import PrefixBook
from prfaas.kvcache.prefix import Change

#: Of keys in one message to the node.
MESSAGE_BYTES = 1 << 20

log = structlog.get_logger()


def can_watch() -> bool:
    """pyzmq comes with an extra of ours."""
    return find_spec("zmq") is not None


def capabilities(book: PrefixBook) -> tuple[str, ...]:
    """Of an engine whose cache is watched."""
    return (OWN_PREFIXES, RESUMES_ANYWHERE) if book.resumes_anywhere else (OWN_PREFIXES,)


async def watch_prefixes(endpoints: Endpoints, book: PrefixBook, send: Callable[[Prefixes], None]) -> None:
    """Without end. What cannot be read is as if it had been missed."""
    from prfaas.engine.vllm.event_stream import batches

    async with aclosing(batches(endpoints)) as published:
        async for payload in published:
            try:
                changes = book.clear() if payload is None else book.take(decode(payload))
            except msgspec.MsgspecError as error:
                log.warning("cache events of the server cannot be read", error=str(error))
                changes = book.clear()
            for message in _messages(changes):
                send(message)


def _messages(changes: Iterable[Change]) -> Iterator[Prefixes]:
    piece, nbytes = list[Change](), 0
    for change in changes:
        piece.append(change)
        nbytes += len(change.keys)
        if nbytes >= MESSAGE_BYTES:
            yield Prefixes(tuple(piece))
            piece, nbytes = [], 0
    if piece:
        yield Prefixes(tuple(piece))
