"""A man in the middle of the KV path who knows the protocol: he zeroes chosen parts and repairs every checksum, so that
nothing but the answer itself can show the damage."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
from crc32c import crc32c

from prfaas.kvcache.layout import Extent, KvLayout, Part, Window
from prfaas.transfer.frames import HEADER_BYTES, Header, Kind, decode, encode
from prfaas.transfer.offer import Offer, offer_for
from prfaas.transfer.pieces import Pieces
from prfaas.transfer.tickets import TICKET_BYTES

#: Whether this part is to be zeroed.
Target = Callable[[KvLayout, Part], bool]


class Tamper:
    """Listens on `port` of the loopback address and passes everything on to `target_port`."""

    def __init__(self, layout: KvLayout, target_port: int) -> None:
        self._layout, self._target_port = layout, target_port
        self.target: Target | None = None
        self.zeroed = 0
        self._pieces: dict[str, Pieces] = {}

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
        """Frames of an attempt may come on any connection, its offer on one of them."""
        while True:
            header = decode(await reader.readexactly(HEADER_BYTES))
            payload = await reader.readexactly(header.length)
            match header.kind:
                case Kind.OFFER:
                    offer = msgspec.msgpack.decode(payload[TICKET_BYTES:], type=Offer)
                    extent, ends = offer.extent, offer.chunk_ends
                    _, pieces = offer_for(self._layout, extent, ends, anywhere(extent), offer.piece_bytes)
                    self._pieces[header.attempt] = pieces
                case Kind.DATA:
                    payload = self._touched(header, payload)
            writer.write(encode(replace(header, payload_crc=crc32c(payload))) + payload)
            await writer.drain()

    def _touched(self, header: Header, payload: bytes) -> bytes:
        """A frame carries pieces of one or more parts, and a part may take several frames."""
        touched, at = bytearray(payload), 0
        for part, is_first, nbytes in self._pieces_of(header):
            if self.target and self.target(self._layout, part):
                touched[at : at + nbytes] = bytes(nbytes)
                self.zeroed += is_first
            at += nbytes
        return bytes(touched)

    def _pieces_of(self, header: Header) -> Iterator[tuple[Part, bool, int]]:
        """The part of each, whether it is the first of that part, and its bytes."""
        pieces = self._pieces[header.attempt]
        for index, part in enumerate(pieces.parts):
            first, stop = pieces.of_part(index)
            for piece in range(max(first, header.index), min(stop, header.index + header.count)):
                yield part, piece == first, pieces.bytes_of(piece, piece + 1)


def anywhere(extent: Extent) -> tuple[Window, ...]:
    """Windows that hold the extent: where its parts lie does not matter to what is sent."""
    return (Window(extent.first, extent.stop, 0), *(Window(at, at, 0, state=True) for at in extent.states))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
