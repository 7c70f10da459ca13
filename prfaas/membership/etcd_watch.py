"""Following a prefix in etcd through everything that can happen to the connection, the server and its history.

In order: list, hand out a Resync, watch from the listing's revision + 1. When the stream breaks, watch again from the
last *delivered* revision + 1, unless the history from there on cannot be had: compacted, or not the history we know,
because the store lost its data and began again. A watch from a revision that a new store has not reached would wait
in silence, and one that it has passed would miss what came before; so a stream, once open, reads back what was last
told before it tells anything.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import structlog

from prfaas.errors import PeerUnavailable
from prfaas.membership.etcd_calls import CALL_S, EtcdCalls, Refused, pauses
from prfaas.membership.store import Batch, Deleted, Entry, Lease, Put, Resync, Snapshot
from prfaas.rpc.v1 import etcd_pb2 as pb

log = structlog.get_logger(__name__)


class _Told:
    """What has been delivered: up to which revision, and the mod_revision of each key that this left in place."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.revision = snapshot.revision
        self._mod_revisions = {entry.key: entry.mod_revision for entry in snapshot.entries}

    def add(self, batch: list[Put | Deleted]) -> None:
        for event in batch:
            match event:
                case Put(entry):
                    self.revision = self._mod_revisions[entry.key] = entry.mod_revision
                case Deleted(key, revision):
                    self.revision = revision
                    self._mod_revisions.pop(key, None)

    def newest(self) -> tuple[str, int] | None:
        """The key changed last among those in place, and when."""
        return max(self._mod_revisions.items(), key=lambda item: item[1], default=None)


class _HistoryGone(Exception):
    """What the watch still has to deliver cannot be had: compacted, or in a history that the store has lost."""


async def watch(calls: EtcdCalls, prefix: str) -> AsyncGenerator[Batch, None]:
    told: _Told | None = None
    pause, interrupted = pauses(), False
    while True:
        try:
            if told is None:
                snapshot = await snapshot_of(calls, prefix)
                told = _Told(snapshot)
                yield [Resync(snapshot)]
            async with aclosing(_events(calls, prefix, told)) as batches:
                async for batch in batches:
                    told.add(batch)
                    pause, interrupted = pauses(), False
                    yield [*batch]
        except _HistoryGone:
            told = None
        except PeerUnavailable as error:
            if not interrupted:
                log.warning("store_watch_interrupted", prefix=prefix, detail=error.detail)
            interrupted = True
        await asyncio.sleep(next(pause))


async def snapshot_of(calls: EtcdCalls, prefix: str) -> Snapshot:
    """A listing may be megabytes, so that one attempt may take as long as all attempts of another call."""
    request = pb.RangeRequest(key=encoded(prefix), range_end=prefix_end(prefix))
    reply = await calls.call("/etcdserverpb.KV/Range", request, pb.RangeResponse, attempt_s=CALL_S)
    return Snapshot(reply.header.revision, tuple(map(to_entry, reply.kvs)))


async def _remembered(calls: EtcdCalls, prefix: str, told: _Told) -> bool:
    """Whether the store's history reaches back to where the watch stands and is the one we know: the newest key in
    place then has the mod_revision we were told, or the prefix is empty if we were told of none."""
    newest = told.newest()
    key, range_end = (encoded(newest[0]), b"") if newest else (encoded(prefix), prefix_end(prefix))
    request = pb.RangeRequest(key=key, range_end=range_end, revision=told.revision, limit=1, keys_only=True)
    try:
        reply = await calls.call("/etcdserverpb.KV/Range", request, pb.RangeResponse)
    except Refused as refusal:
        if refusal.code is grpc.StatusCode.OUT_OF_RANGE:  # compacted, or in the future
            return False
        raise
    return [kv.mod_revision for kv in reply.kvs] == ([newest[1]] if newest else [])


async def _events(calls: EtcdCalls, prefix: str, told: _Told) -> AsyncGenerator[list[Put | Deleted], None]:
    """What one stream delivers after what was told, until it breaks: PeerUnavailable or _HistoryGone."""
    # Without `fragment`: then all events of one revision come in one response, and the last one is a place to resume
    # from.
    start = told.revision + 1
    create = pb.WatchCreateRequest(key=encoded(prefix), range_end=prefix_end(prefix), start_revision=start)
    request = pb.WatchRequest(create_request=create)
    async with aclosing(calls.stream("/etcdserverpb.Watch/Watch", request, pb.WatchResponse)) as responses:
        async for response in responses:
            if response.compact_revision:
                raise _HistoryGone
            if response.canceled:
                # An expired login is reported so, and only in words.
                calls.forget_login()
                raise PeerUnavailable("store", f"watch canceled: {response.cancel_reason}")
            if response.created and not await _remembered(calls, prefix, told):
                raise _HistoryGone
            if response.events:
                yield [_to_event(event) for event in response.events]


def _to_event(event: pb.Event) -> Put | Deleted:
    if event.type == pb.Event.DELETE:
        return Deleted(decoded(event.kv.key), event.kv.mod_revision)
    return Put(to_entry(event.kv))


def to_entry(kv: pb.KeyValue) -> Entry:
    return Entry(decoded(kv.key), kv.value, kv.mod_revision, Lease(kv.lease) if kv.lease else None)


def encoded(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def decoded(key: bytes) -> str:
    """Any bytes may be a key to others; ours are text."""
    return key.decode(errors="surrogateescape")


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys with the prefix."""
    kept = encoded(prefix).rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
