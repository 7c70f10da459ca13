"""Memory for sequences that were prefilled here and wait for their decode: first fit, in one range of bytes."""

from bisect import insort

from prfaas.kvcache.layout import ALIGN_BYTES


class Shelf:
    """Offsets are multiples of ALIGN_BYTES, so that windows may begin at them."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        #: (offset, end, whose), sorted.
        self._taken: list[tuple[int, int, str]] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, owner: str, nbytes: int) -> int | None:
        """Where there is room, or None."""
        at, size = 0, -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        for offset, end, _ in self._taken:
            if at + size <= offset:
                break
            at = end
        if at + size > self._nbytes:
            return None
        insort(self._taken, (at, at + size, owner))
        return at

    def give_back(self, owner: str) -> None:
        """All that it has; idempotent."""
        self._taken = [span for span in self._taken if span[2] != owner]
