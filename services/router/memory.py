"""What the process's allocators are told, so that memory goes back to the system and collections stay short."""

import ctypes
import gc
from contextlib import suppress

#: For `mallopt`, as in malloc.h.
M_MMAP_THRESHOLD = -3
#: Bodies and prompts of this size and more get pages of their own.
LARGE_BYTES = 1 << 21


def return_large_pieces() -> None:
    """At the start. The GNU C library would otherwise, once it has seen large pieces freed, put the next ones among the
    small ones, and what a storm of long prompts took would stay with the process."""
    with suppress(AttributeError):  # only that library has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def settle() -> None:
    """When all is loaded. What is there now stays: no collection has to look at it again, and what loading took beside
    goes back to the system. Requests leave few cycles behind, but thousands of open streams make every full collection
    long, so that there are fewer of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
