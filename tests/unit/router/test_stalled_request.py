"""A request that hangs where no deadline of the flow is: in what this router asks of itself."""

import asyncio
from contextlib import aclosing

import pytest

from prfaas.errors import NoProgress
from prfaas.flows.progress import Stage
from prfaas.flows.serve import ServeParams
from prfaas.flows.story import Story
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.live.watchdog import Watchdog
from prfaas.request import Matches, Request, RequestId, Sampling
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.metrics import RouterMetrics
from services.router.openai.errors import status_of
from services.router.same_tokenizer import SameTokenizer
from tests.unit.scheduling.steering_scenes import NEAR, case_study

GRACE_S, LIVENESS_S = 0.2, 10.0
PARAMS = ServeParams(
    reserve_timeout_s=0.1,
    prefill_timeout_s=1.0,
    prefill_timeout_s_per_token=0.0,
    first_token_timeout_s=1.0,
    token_gap_timeout_s=1.0,
)


async def never(_request: Request) -> Matches:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
def view():
    return case_study(1, 1)


async def test_field_C10_a_request_that_no_deadline_ends_ends_all_the_same(view):
    """Its client gets a 504 that names the stage, it is counted, and it is not in flight any more. A deadline that
    admission asks for is not known then, and nobody waits for it."""
    steering = Steering(NEAR, RoutingParams(1000), 0.0, DemandParams())
    links, watchdog = LinkPool(lambda _: pytest.fail("nobody is asked")), Watchdog(GRACE_S)
    ports = LiveServePorts(AsyncioClock(), lambda: view, links, new_attempt_id, steering)
    machine = Admission(AdmissionParams(max_running=1))
    metrics = RouterMetrics(["m"], lambda: 0.0, lambda: False, LinkCounters(), machine)
    metrics.watchdog = watchdog
    same = SameTokenizer(lambda: view, "")
    backend = ClusterBackend(same, ports, steering, PARAMS, metrics, 1, str.encode, never, watchdog=watchdog)
    request = Request(id=RequestId("0" * 32), model="m", prompt=bytes(40), sampling=Sampling(max_tokens=1))
    watching = asyncio.create_task(watchdog.run())
    try:
        async with asyncio.timeout(LIVENESS_S):
            async with aclosing(backend.complete(request, Story())) as batches:
                with pytest.raises(NoProgress, match="stage look_up") as caught:
                    await anext(batches)
            assert await backend.predicted_ttft_s(request) is None
    finally:
        watching.cancel()
    assert status_of(caught.value) == 504
    page = backend.metrics_text().decode()
    assert f'prfaas_router_stalled_requests_total{{stage="{Stage.LOOK_UP.value}"}} 1.0' in page
    assert "prfaas_router_in_flight_requests 0.0" in page
    assert "prfaas_router_oldest_progress_seconds 0.0" in page
