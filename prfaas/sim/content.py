"""What simulated KV and tokens are made of.

`DigestContent`: KV is a digest of the prompt it was computed from and tokens are drawn from that digest, so that KV
which is missing or another request's shows in the output. `BlankContent` is for studies of many long prompts: nothing
is hashed, and all tokens are 0.
"""

import hashlib
from typing import Protocol

from prfaas.request import TOKEN_BYTES, Request


class Content(Protocol):
    def kv_of(self, request: Request) -> bytes:
        """What a prefill of the request makes."""
        ...

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        """The tokens at these positions of the output, drawn from KV that may be wrong."""
        ...


class DigestContent:
    def kv_of(self, request: Request) -> bytes:
        return hashlib.sha256(request.prompt[: request.handoff_tokens * TOKEN_BYTES]).digest()

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        last = request.prompt[request.handoff_tokens * TOKEN_BYTES :]
        return b"".join(
            hashlib.sha256(kv + last + position.to_bytes(4, "little")).digest()[:TOKEN_BYTES]
            for position in range(start, stop)
        )


class BlankContent:
    def kv_of(self, request: Request) -> bytes:
        return b"kv"

    def tokens(self, kv: bytes, request: Request, start: int, stop: int) -> bytes:
        return bytes(TOKEN_BYTES * (stop - start))
