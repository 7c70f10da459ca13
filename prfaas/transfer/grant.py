"""What the frames of one attempt may write: each part once, in its place, under its generation."""

from collections.abc import Sequence

from prfaas.kvcache.layout import Part
from prfaas.transfer.frames import Cause, Header, ProtocolError


class Grant:
    """Lane threads claim a part before they write it. One `dict.pop` decides who had it, so that no part is written
    twice, whichever threads its frames come through."""

    def __init__(self, attempt: str, generation: int, parts: Sequence[Part]) -> None:
        self._attempt, self._generation, self._parts = attempt, generation, parts
        self._unclaimed = {part.index: part for part in parts}

    def claim(self, header: Header) -> Part:
        """The place of the part that this header announces. Raises ProtocolError."""
        self.fits(header)
        if header.index >= len(self._parts):
            raise ProtocolError(Cause.UNEXPECTED_PART, f"part {header.index} of {len(self._parts)}")
        part = self._parts[header.index]
        if (header.offset, header.length) != (part.offset, part.nbytes):
            detail = f"part {part.index} at {header.offset}+{header.length}, not {part.offset}+{part.nbytes}"
            raise ProtocolError(Cause.UNEXPECTED_PART, detail)
        if self._unclaimed.pop(part.index, None) is None:
            raise ProtocolError(Cause.DUPLICATE_PART, f"part {part.index}")
        return part

    def fits(self, header: Header) -> None:
        """Raises ProtocolError when a frame is of another attempt or of an earlier holder of the memory."""
        if header.attempt != self._attempt:
            raise ProtocolError(Cause.UNKNOWN_ATTEMPT, f"{header.attempt} on the lane of {self._attempt}")
        if header.generation != self._generation:
            raise ProtocolError(Cause.STALE_GENERATION, f"ours {self._generation}, theirs {header.generation}")
