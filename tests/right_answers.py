"""What simulated clusters must answer."""

from prfaas.request import Request
from prfaas.sim.content import DigestContent


def expected_output(request: Request) -> bytes:
    """The tokens that any correct run of the request yields, with `DigestContent`."""
    content = DigestContent()
    return content.tokens(content.kv_of(request), request, 0, request.sampling.max_tokens)
