"""The embedded server's side of one watch stream, on which etcd's clients may have several watches.

Each watch is a task that reads the store's history at the pace at which its client takes the answers, so nothing is
queued.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

from prfaas.membership.etcd_watch import decoded, encoded
from prfaas.membership.memory import MemoryStore
from prfaas.membership.revisions import Covers, HistoryGone
from prfaas.membership.store import Deleted, Entry, Put
from prfaas.rpc.v1 import etcd_pb2 as pb


class WatchStream:
    def __init__(self, store: MemoryStore, write: Callable[[pb.WatchResponse], Awaitable[None]]) -> None:
        self._store = store
        self._write = write
        self._writing = asyncio.Lock()
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._ids = count()

    async def serve(self, requests: AsyncIterator[pb.WatchRequest]) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for request in requests:
                match request.WhichOneof("request_union"):
                    case "create_request":
                        create = request.create_request
                        watch_id = create.watch_id or next(self._ids)
                        watch = tasks.create_task(self._follow(create, watch_id), name=f"store-watch-{watch_id}")
                        self._watches[watch_id] = watch
                    case "cancel_request" if request.cancel_request.watch_id in self._watches:
                        watch_id = request.cancel_request.watch_id
                        self._watches.pop(watch_id).cancel()
                        await self._answer(watch_id, canceled=True)
            for watch in self._watches.values():
                watch.cancel()

    async def _follow(self, create: pb.WatchCreateRequest, watch_id: int) -> None:
        covers = covering(create.key, create.range_end)
        with self._store.open() as data:
            # A start that is still to come is waited for in silence, as etcd does.
            place = create.start_revision - 1 if create.start_revision else data.revision
        await self._answer(watch_id, created=True)
        while True:
            with self._store.open() as data:
                try:
                    events = [to_event(event) for event in data.changes(covers, place)]
                except HistoryGone as gone:
                    # etcd names the first revision that can still be watched.
                    return await self._answer(watch_id, canceled=True, compact_revision=gone.compacted + 1)
                place = max(place, data.revision)
            if events:
                await self._answer(watch_id, events=events)
            else:
                await self._store.moved(place)

    async def _answer(
        self,
        watch_id: int,
        *,
        created: bool = False,
        canceled: bool = False,
        compact_revision: int = 0,
        events: list[pb.Event] | None = None,
    ) -> None:
        with self._store.open() as data:
            header = pb.ResponseHeader(revision=data.revision)
        async with self._writing:
            await self._write(
                pb.WatchResponse(
                    header=header,
                    watch_id=watch_id,
                    created=created,
                    canceled=canceled,
                    compact_revision=compact_revision,
                    events=events,
                )
            )


def covering(key: bytes, range_end: bytes) -> Covers:
    """etcd's ranges: one key, [key, end), or with an end of one zero byte every key from `key` on."""
    if not range_end:
        only = decoded(key)
        return lambda other: other == only
    if range_end == b"\0":
        return lambda other: encoded(other) >= key
    return lambda other: key <= encoded(other) < range_end


def to_kv(entry: Entry, *, keys_only: bool = False) -> pb.KeyValue:
    value = b"" if keys_only else entry.value
    return pb.KeyValue(key=encoded(entry.key), value=value, mod_revision=entry.mod_revision, lease=entry.lease or 0)


def to_event(event: Put | Deleted) -> pb.Event:
    match event:
        case Put(entry):
            return pb.Event(type=pb.Event.PUT, kv=to_kv(entry))
        case Deleted(key, revision):
            return pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=encoded(key), mod_revision=revision))
