"""A man in the middle of the KV path who knows the protocol: he zeroes chosen parts and repairs every checksum, so that
nothing but the answer itself can show the damage."""

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
from crc32c import crc32c

from prfaas.kvcache.layout import KvLayout, Part
from prfaas.transfer.frames import HEADER_BYTES, Kind, decode, encode
from prfaas.transfer.offer import Offer, Seal

#: Whether this part is to be zeroed.
Target = Callable[[KvLayout, Part], bool]


class Tamper:
    """Listens on `port` of the loopback address and passes everything on to `target_port`."""

    def __init__(self, layout: KvLayout, target_port: int) -> None:
        self._layout, self._target_port = layout, target_port
        self.target: Target | None = None
        self.zeroed = 0

    async def start(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._relay, "127.0.0.1", port)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_connection("127.0.0.1", self._target_port)
        back = asyncio.create_task(_copy(theirs, writer))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._forward(reader, to_them)
        to_them.close()
        await back

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts: tuple[Part, ...] = ()
        crcs: dict[int, int] = {}
        while True:
            header = decode(await reader.readexactly(HEADER_BYTES))
            payload = await reader.readexactly(header.length)
            match header.kind:
                case Kind.OFFER:
                    offer = msgspec.msgpack.decode(payload, type=Offer)
                    parts = self._layout.parts(offer.tokens, offer.chunk_ends)
                case Kind.PART:
                    if self.target and self.target(self._layout, parts[header.index]):
                        payload = bytes(header.length)
                        self.zeroed += 1
                    crcs[header.index] = crc32c(payload)
                case Kind.SEAL:
                    seal = msgspec.msgpack.decode(payload, type=Seal)
                    digest = crc32c(struct.pack(f"<{len(parts)}I", *(crcs[index] for index in range(len(parts)))))
                    payload = msgspec.msgpack.encode(msgspec.structs.replace(seal, digest=digest))
            header = replace(header, length=len(payload), payload_crc=crc32c(payload))
            writer.write(encode(header) + payload)
            await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
