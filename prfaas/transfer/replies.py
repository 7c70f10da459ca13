"""Payloads of what a receiver answers."""

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of ACCEPT and ACK: pieces (first, stop) that were applied and checked, and how many bytes of different
    pieces may be sent in all."""

    ranges: tuple[tuple[int, int], ...]
    credit_bytes: int


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of COMPLETE."""

    payload_bytes: int
