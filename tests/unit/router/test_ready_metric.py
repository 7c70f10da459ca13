"""A router's metrics say what `/ready` says."""

import pytest

from prfaas.cluster import ClusterView
from prfaas.flows.serve import ServeParams
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.live.watchdog import Watchdog
from prfaas.request import NO_MATCHES, Matches, Request
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.metrics import RouterMetrics
from services.router.same_tokenizer import SameTokenizer
from tests.unit.scheduling.steering_scenes import NEAR, case_study

PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=1.0,
    prefill_timeout_s_per_token=0.0,
    first_token_timeout_s=1.0,
    token_gap_timeout_s=1.0,
)


async def nothing(_request: Request) -> Matches:
    return NO_MATCHES


def backend(view: ClusterView) -> ClusterBackend:
    steering = Steering(NEAR, RoutingParams(1000), 0.0, DemandParams())
    links = LinkPool(lambda _: pytest.fail("nobody is asked"))
    ports = LiveServePorts(AsyncioClock(), lambda: view, links, new_attempt_id, steering)
    metrics = RouterMetrics(
        ["m"], lambda: 0.0, lambda: False, LinkCounters(), Admission(AdmissionParams(max_running=1))
    )
    same, watchdog = SameTokenizer(lambda: view, ""), Watchdog(1.0)
    return ClusterBackend(same, ports, steering, PARAMS, metrics, 1, str.encode, nothing, watchdog=watchdog)


def ready(router: ClusterBackend) -> float:
    [line] = [line for line in router.metrics_text().decode().splitlines() if line.startswith("prfaas_router_ready ")]
    return float(line.split()[1])


async def test_it_is_ready_while_there_is_a_path_and_it_does_not_drain():
    router = backend(case_study(1, 1))
    assert (router.obstacle(), ready(router)) == (None, 1)
    router.draining = True
    assert router.obstacle() and ready(router) == 0
    router = backend(ClusterView())
    assert router.obstacle() and ready(router) == 0
