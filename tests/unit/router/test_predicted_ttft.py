"""What admission asks the backend: how long a request would take to its first token, if it went now."""

from dataclasses import replace

import pytest

from prfaas.cluster import ClusterView, NodeLoad
from prfaas.request import NO_MATCHES, Match, Matches, Request, RequestId, Sampling
from prfaas.scheduling.routing import RoutingParams
from tests.unit.router.backends import backend_on
from tests.unit.scheduling.steering_scenes import PROFILES, case_study

RULE = RoutingParams(10**6, profiles=PROFILES)


async def predicted_s(
    view: ClusterView, prompt_tokens: int, rule: RoutingParams = RULE, matches: Matches = NO_MATCHES
) -> float | None:
    async def find(request: Request) -> Matches:
        assert request.salt == b"salt of acme"
        return matches

    def salt(tenant: str) -> bytes:
        return b"salt of " + tenant.encode()

    backend = backend_on(lambda: view, rule, salt, find)
    request = Request(
        id=RequestId("0" * 32),
        model="m",
        prompt=b"\0\0\0\0" * prompt_tokens,
        sampling=Sampling(max_tokens=1),
        tenant="acme",
    )
    return await backend.predicted_ttft_s(request)


async def test_it_follows_length_load_and_what_is_cached():
    """As routes do, by the hardware's profile."""
    idle = case_study(1, 1)
    short, long = await predicted_s(idle, 1000), await predicted_s(idle, 32_000)
    assert short is not None and long is not None and 0 < short < long
    cached = await predicted_s(idle, 32_000, matches={name: Match(31_000, 31_000) for name in idle.nodes})
    assert cached is not None and cached < long
    busy = case_study(1, 1, loads={"d0": NodeLoad(queued_prefill_tokens=500_000)})
    queued = await predicted_s(busy, 1000)
    assert queued is not None and queued > short


@pytest.mark.parametrize("view", [ClusterView(), case_study(1, 1)], ids=["nobody there", "unknown hardware"])
async def test_what_is_not_known_refuses_nobody(view: ClusterView):
    assert await predicted_s(view, 1000, replace(RULE, profiles={})) is None
