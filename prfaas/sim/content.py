"""What simulated KV and tokens are made of.

`DigestContent`: KV is a digest of the tokens it was computed from, and each token is drawn from that of all before it,
so that KV which is missing or another request's shows in the output, and a sequence can be gone on with anywhere.
`BlankContent` is for studies of many long prompts: nothing is hashed, and all tokens are 0.
"""

import hashlib
from typing import Protocol

from prfaas.request import TOKEN_BYTES, Request

#: Of 256 bits.
_PRIME = (1 << 256) - 189


class Content(Protocol):
    def kv_of(self, request: Request) -> bytes:
        """What a prefill of the request makes."""
        ...

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        """The tokens at these positions of the output, drawn from KV that may be wrong."""
        ...


class DigestContent:
    def kv_of(self, request: Request) -> bytes:
        return _after(bytes([1]), request.prompt[: request.handoff_tokens * TOKEN_BYTES])

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        output, last, sampling = bytearray(), request.prompt[request.handoff_tokens * TOKEN_BYTES :], request.sampling
        for number in range(stop):
            kv = _after(kv, last)
            chance = (sampling.seed, request.prompt_tokens + number) if sampling.temperature else ()
            last = hashlib.sha256(kv + repr(chance).encode()).digest()[:TOKEN_BYTES]
            output += last
        return bytes(output[start * TOKEN_BYTES :])


def _after(kv: bytes, tokens: bytes) -> bytes:
    """The digest after these tokens: that of all of them at once is that of one after the other."""
    return (int.from_bytes(kv + tokens) % _PRIME).to_bytes(32)


class BlankContent:
    def kv_of(self, request: Request) -> bytes:
        return b"kv"

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        return bytes(TOKEN_BYTES * (stop - start))


BLANK = BlankContent()
