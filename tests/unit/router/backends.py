"""A router's backend on a view of a cluster, without links: what it says by itself, it says without asking anybody."""

from collections.abc import Callable

from prfaas.cluster import ClusterView
from prfaas.flows.serve import ServeParams
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.live.watchdog import Watchdog
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from services.router.backend import ClusterBackend, Find, new_attempt_id
from services.router.metrics import RouterMetrics
from services.router.same_tokenizer import SameTokenizer
from tests.unit.scheduling.steering_scenes import NEAR

PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=1.0,
    prefill_timeout_s_per_token=0.0,
    first_token_timeout_s=1.0,
    token_gap_timeout_s=1.0,
)


def backend_on(
    view: Callable[[], ClusterView],
    rule: RoutingParams,
    salt: Callable[[str], bytes] = str.encode,
    find: Find | None = None,
) -> ClusterBackend:
    steering = Steering(NEAR, rule, 0.0, DemandParams())
    ports = LiveServePorts(AsyncioClock(), view, LinkPool(no_link), new_attempt_id, steering)  # type: ignore[arg-type]
    machine = Admission(AdmissionParams(max_running=1))
    metrics = RouterMetrics(["m"], lambda: 0.0, lambda: False, LinkCounters(), machine)
    same = SameTokenizer(view, "")
    return ClusterBackend(same, ports, steering, PARAMS, metrics, 1, salt, find, watchdog=Watchdog(30.0))


def no_link(*_: object) -> None:
    raise AssertionError("nobody is asked")
