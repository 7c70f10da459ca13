"""Every metric of prfaas: its name, kind, help, labels and buckets.

Names are `prfaas_<component>_<what>_<base unit>`; counters end in `_total`. A closed label lists its values, so that
all its series exist from the start; an open one (a model's name) is bounded by `MAX_OPEN_VALUES`. Registration
(`prfaas.observe.metrics`) and the reference page under `docs/` are generated from the specs below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from prfaas.cluster import NodeKind, Role
from prfaas.flows.convert_role import Phase
from prfaas.flows.story import Ending
from prfaas.request import Mode, Path, Reason

#: What a label's value becomes when it is not one of a closed label's, or one too many of an open label's.
OTHER = "other"
MAX_OPEN_VALUES = 64


class Outcome(Enum):
    """How a request ended, as its client saw it. DISCONNECTED: the client left first (499 in the logs)."""

    OK = "ok"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Label:
    """`values` closes the label; without any it is open."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Counter:
    """Only grows."""

    name: str
    help: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Gauge:
    """Takes any value."""

    name: str
    help: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts observations in buckets; `buckets` are upper bounds in the metric's unit."""

    name: str
    help: str
    buckets: tuple[float, ...]
    labels: tuple[Label, ...] = ()


Metric = Counter | Gauge | Histogram


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


MODEL = Label("model")
PATH = Label("path", _values(Path))
#: `none`: the request ended before a route was chosen.
REQUEST_PATH = Label("path", (*PATH.values, "none"))
OUTCOME = Label("outcome", _values(Outcome))
REASON = Label("reason", _values(Reason))
ENDING = Label("ending", tuple(value for value in _values(Ending) if value != Ending.RUNNING.value))
KIND = Label("kind", _values(NodeKind))
ROLE = Label("role", _values(Role))
MODE = Label("mode", _values(Mode))
PEER_REGION = Label("peer_region")
PHASE = Label("phase", _values(Phase))
DIRECTION = Label("direction", ("forward", "backward"))

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(1 << exponent) for exponent in range(4, 19))

REQUESTS = Counter("prfaas_router_requests_total", "Requests that ended.", (MODEL, REQUEST_PATH, OUTCOME))
TTFT = Histogram("prfaas_router_ttft_seconds", "From the request's arrival to its first token.", _TTFT_S, (PATH,))
ITL = Histogram("prfaas_router_itl_seconds", "Between two batches of tokens of one stream.", _ITL_S)
REQUEST_DURATION = Histogram(
    "prfaas_router_request_duration_seconds", "From the request's arrival to its end.", _REQUEST_S
)
PROMPT_TOKENS = Counter("prfaas_router_prompt_tokens_total", "Tokens of the prompts that were routed.")
OUTPUT_TOKENS = Counter("prfaas_router_output_tokens_total", "Tokens sent to clients.")
UNCACHED_TOKENS = Histogram(
    "prfaas_router_uncached_tokens", "Prompt tokens left to compute: what routing compares with the threshold.", _TOKENS
)
ROUTES = Counter("prfaas_router_routes_total", "Routes chosen, retries included.", (PATH, REASON))
KV_TRANSFER_BYTES = Counter(
    "prfaas_router_kv_transfer_bytes_total", "KV that crossed from prefill to decode, as prefill reported it.", (PATH,)
)
RECOMPUTED_TOKENS = Counter(
    "prfaas_router_recomputed_tokens_total",
    "Prompt tokens that decode computed itself. More than one per request means that KV was lost on the way.",
)
ATTEMPTS = Counter("prfaas_router_attempts_total", "Attempts at requests, by how they ended.", (ENDING,))
IN_FLIGHT = Gauge("prfaas_router_in_flight_requests", "Requests being served now.")
VIEW_AGE = Gauge("prfaas_router_view_age_seconds", "Time since the store last confirmed the view of the cluster.")
LIVE_NODES = Gauge("prfaas_router_live_nodes", "Workers in the view.", (KIND,))
THRESHOLD = Gauge(
    "prfaas_router_threshold_tokens", "Prompts with more uncached tokens than this are prefilled remotely."
)
MODE_NOW = Gauge("prfaas_router_mode", "1 for the mode of routing in force, 0 for the others.", (MODE,))
LEADS = Gauge("prfaas_router_leads", "1 on the router that runs the slow loop.")
ROUTER_PLAN_EPOCH = Gauge("prfaas_router_plan_epoch", "Epoch of the plan in force; 0 without one.")
LINK_CAPACITY = Gauge(
    "prfaas_router_link_capacity_bytes_per_second", "What the link from a region is taken to carry.", (PEER_REGION,)
)
LINK_GOODPUT = Gauge("prfaas_router_link_goodput_bytes_per_second", "KV coming from a region.", (PEER_REGION,))
LINK_QUEUE = Gauge("prfaas_router_link_queued_bytes", "KV that waits to leave a region.", (PEER_REGION,))

ENGINE_PREFILL_TOKENS = Counter("prfaas_worker_engine_prefill_tokens_total", "Prompt tokens that the engine prefilled.")
DECODE_FORWARDED_TOKENS = Counter(
    "prfaas_worker_decode_forwarded_tokens_total", "Tokens fed to decode steps, prompt tokens included."
)
ACTIVE_SEQUENCES = Gauge("prfaas_worker_engine_active_sequences", "Sequences in the decode batch.")
QUEUED_PREFILL_TOKENS = Gauge("prfaas_worker_queued_prefill_tokens", "Prompt tokens waiting for prefill.")
KEPT_SEQUENCES = Gauge("prfaas_worker_kept_sequences", "Sequences prefilled here that wait for their decode.")
KV_FREE_BYTES = Gauge("prfaas_worker_kv_free_bytes", "Free bytes of the KV pool.")
KV_SPANS = Gauge("prfaas_worker_kv_spans", "Spans taken in the KV pool.")
KV_SENT_BYTES = Counter("prfaas_worker_kv_sent_bytes_total", "KV payload sent to other nodes.")
KV_RECEIVED_BYTES = Counter("prfaas_worker_kv_received_bytes_total", "KV payload received and checked.")
KV_REFUSED_FRAMES = Counter(
    "prfaas_worker_kv_refused_frames_total", "Frames refused: late, damaged or of an unknown attempt."
)
KV_FAILED_TRANSFERS = Counter("prfaas_worker_kv_failed_transfers_total", "Transfers that did not complete.")
RESERVATIONS = Gauge("prfaas_worker_reservations", "Attempts that hold a place in this worker's admission.")
ADMISSION_REFUSED = Counter("prfaas_worker_admission_refused_total", "Attempts refused for want of room.")
SESSIONS = Gauge("prfaas_worker_sessions", "Token links open to routers.")
WORKER_ROLE = Gauge("prfaas_worker_role", "1 for the role the worker has now, 0 for the others.", (ROLE,))

WORKER_PHASE = Gauge("prfaas_worker_phase", "1 for the phase of carrying out a plan, 0 for the others.", (PHASE,))
PLAN_EPOCH = Gauge("prfaas_worker_plan_epoch", "Epoch of the latest plan that the worker has read.")
ROLE_CHANGES = Counter("prfaas_worker_role_changes_total", "Times that the worker changed its role or its share.")
REFUSED_PLANS = Counter("prfaas_worker_refused_plans_total", "Plans refused because a later one was known.")

RELAY_BYTES = Counter(
    "prfaas_relay_bytes_total",
    "Bytes handed on. forward: toward the target; backward: toward the client.",
    (DIRECTION,),
)

ROUTER: tuple[Metric, ...] = (
    REQUESTS,
    TTFT,
    ITL,
    REQUEST_DURATION,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    UNCACHED_TOKENS,
    ROUTES,
    KV_TRANSFER_BYTES,
    RECOMPUTED_TOKENS,
    ATTEMPTS,
    IN_FLIGHT,
    VIEW_AGE,
    LIVE_NODES,
    THRESHOLD,
    MODE_NOW,
    LEADS,
    ROUTER_PLAN_EPOCH,
    LINK_CAPACITY,
    LINK_GOODPUT,
    LINK_QUEUE,
)
WORKER: tuple[Metric, ...] = (
    ENGINE_PREFILL_TOKENS,
    DECODE_FORWARDED_TOKENS,
    ACTIVE_SEQUENCES,
    QUEUED_PREFILL_TOKENS,
    KEPT_SEQUENCES,
    KV_FREE_BYTES,
    KV_SPANS,
    KV_SENT_BYTES,
    KV_RECEIVED_BYTES,
    KV_REFUSED_FRAMES,
    KV_FAILED_TRANSFERS,
    RESERVATIONS,
    ADMISSION_REFUSED,
    SESSIONS,
    WORKER_ROLE,
    WORKER_PHASE,
    PLAN_EPOCH,
    ROLE_CHANGES,
    REFUSED_PLANS,
)
RELAY: tuple[Metric, ...] = (RELAY_BYTES,)

COMPONENTS: Mapping[str, tuple[Metric, ...]] = {"router": ROUTER, "worker": WORKER, "relay": RELAY}
