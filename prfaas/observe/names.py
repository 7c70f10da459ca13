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
from prfaas.flows.progress import Stage
from prfaas.flows.story import Ending, Moved
from prfaas.request import TTFT_TERMS, Mode, Path, Reason
from prfaas.scheduling.admission import Limit
from prfaas.scheduling.blame import Guard
from prfaas.scheduling.breaker import Cause as BreakerCause
from prfaas.scheduling.breaker import Circuit
from prfaas.scheduling.canary import Verdict
from prfaas.security import Refusal
from prfaas.transfer.frames import Cause

#: What a label's value becomes when it is not one of a closed label's, or one too many of an open label's.
OTHER = "other"
MAX_OPEN_VALUES = 64


class Outcome(Enum):
    """How a request ended, as its client saw it. OVERLOADED: refused for want of room, by limits of the tenant's or the
    cluster's, or because the router was stopping. FAILED: whatever else is no fault of the client's. DISCONNECTED: the
    client left first (499 in the logs)."""

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
TERM = Label("term", TTFT_TERMS)
REASON = Label("reason", _values(Reason))
ENDING = Label("ending", tuple(value for value in _values(Ending) if value != Ending.RUNNING.value))
KIND = Label("kind", _values(NodeKind))
ROLE = Label("role", _values(Role))
MODE = Label("mode", _values(Mode))
REGION = Label("region")
PEER_REGION = Label("peer_region")
PHASE = Label("phase", _values(Phase))
REFUSAL = Label("reason", _values(Refusal))
CAUSE = Label("cause", _values(Cause))
DIRECTION = Label("direction", ("forward", "backward"))

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
#: What no term of the account covers should be under a millisecond.
_UNACCOUNTED_S = (0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_TERM_S = (0.0001, 0.0005, 0.001, 0.0025, *_TTFT_S)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(1 << exponent) for exponent in range(4, 19))

REQUESTS = Counter("prfaas_router_requests_total", "Requests that ended.", (MODEL, REQUEST_PATH, OUTCOME))
TTFT = Histogram("prfaas_router_ttft_seconds", "From the request's arrival to its first token.", _TTFT_S, (PATH,))
TTFT_TERM = Histogram(
    "prfaas_router_ttft_term_seconds",
    "What the time to the first token went into, term by term; a term that did not occur is 0. The terms are those of"
    " the receipt's account.",
    _TERM_S,
    (TERM, PATH),
)
TTFT_UNACCOUNTED = Histogram(
    "prfaas_router_ttft_unaccounted_seconds",
    "What of the time to the first token no term covers, or they cover too much.",
    _UNACCOUNTED_S,
    (PATH,),
)
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
    "Prompt tokens that decode computed itself. More than one per route means that KV was lost on the way.",
    (PATH,),
)
_GUARD = Label("around", _values(Guard))
BREAKERS = Gauge(
    "prfaas_router_breakers",
    "Breakers that are not closed, by what they are around: a source of prefills, a pair of source and decode node, a"
    " link between regions.",
    (_GUARD, Label("circuit", tuple(value for value in _values(Circuit) if value != Circuit.CLOSED.value))),
)
BREAKERS_OPENED = Counter(
    "prfaas_router_breakers_opened_total",
    "Breakers that opened. slow: prefills had not ended in their time; failed: they had failed; stalled: senders"
    " waited for answers of the other region and got none.",
    (_GUARD, Label("cause", _values(BreakerCause))),
)
BREAKER_PROBES = Counter(
    "prfaas_router_breaker_probes_total",
    "Attempts that were let through to find out, by whether that closed the breaker, failed, or told nothing.",
    (_GUARD, Label("outcome", ("closed", "failed", "unknown"))),
)
FULL_SOURCES = Gauge(
    "prfaas_router_full_sources", "Sources of prefills that have as many under way as they are trusted with."
)
HEDGES = Counter(
    "prfaas_router_hedges_total",
    "Prefills that were begun beside one elsewhere that took too long. won: they were first.",
    (Label("what", ("started", "won")),),
)
ATTEMPTS = Counter("prfaas_router_attempts_total", "Attempts at requests, by how they ended.", (ENDING,))
MIGRATIONS = Counter(
    "prfaas_router_migrations_total",
    "Streams that lost their decode node after their first token, by what became of them. moved: went on elsewhere;"
    " complete: had all their tokens; inexact: nobody could have gone on with the same tokens; exhausted: nobody did"
    " within router.max_migrations and router.migration_timeout_s; left: the client did not wait.",
    (Label("outcome", _values(Moved)),),
)
MIGRATION_GAP = Histogram(
    "prfaas_router_migration_gap_seconds",
    "Of streams that went on elsewhere: between the last token from the old node and the first from the new one.",
    _REQUEST_S,
)
REPLAYED_TOKENS = Counter(
    "prfaas_router_replayed_tokens_total",
    "Tokens, of prompts and of answers so far, that the new nodes of such streams had to compute again, or had cached.",
    (Label("kind", ("computed", "cached")),),
)
IN_FLIGHT = Gauge("prfaas_router_in_flight_requests", "Requests being served now.")
STALLED = Counter(
    "prfaas_router_stalled_requests_total",
    "Requests that were ended because they got nowhere, by what they waited for. No wait had ended by itself.",
    (Label("stage", _values(Stage)),),
)
OLDEST_PROGRESS = Gauge(
    "prfaas_router_oldest_progress_seconds",
    "Of the requests that are waited for, the longest that one has reached nothing new.",
)
CANARIES = Counter(
    "prfaas_router_canaries_total",
    "Requests of the router's own whose right answers it knows. Others count none of them.",
    (Label("verdict", _values(Verdict)),),
)
SHUNNED = Gauge(
    "prfaas_router_shunned_workers",
    "Workers that requests are kept from: the link to them is broken, or canaries came back wrong from them.",
    (Label("why", ("unreachable", "distrusted")),),
)
HTTP_CONNECTIONS = Gauge("prfaas_router_http_open_connections", "Connections of clients that are open.")
HTTP_ACCEPTED = Counter("prfaas_router_http_connections_total", "Connections that clients have made.")
HTTP_REFUSED = Counter(
    "prfaas_router_http_refused_total",
    "Answers to what was no request, broke a limit of http.* or came too late. They count as no request.",
    (Label("status", ("400", "405", "408", "413", "417", "431", "501", "503", "505")),),
)
HTTP_BODIES = Gauge("prfaas_router_http_body_bytes", "What http.max_bodies_bytes bounds.")
TLS_CERTIFICATE_VALID = Gauge(
    "prfaas_router_tls_certificate_valid_seconds",
    "How long the endpoint's certificate in use is still valid; infinite without one.",
)
TLS_CERTIFICATES = Counter(
    "prfaas_router_tls_certificates_total",
    "Times that the endpoint's certificate was read, the first at the start.",
    (Label("outcome", ("ok", "failed")),),
)
READY = Gauge("prfaas_router_ready", "1 while the router is ready, 0 while it drains or has no usable path.")
VIEW_AGE = Gauge("prfaas_router_view_age_seconds", "Time since the store last confirmed the view of the cluster.")
LIVE_NODES = Gauge("prfaas_router_live_nodes", "Workers in the view.", (KIND,))
THRESHOLD = Gauge(
    "prfaas_router_threshold_tokens", "Prompts with more uncached tokens than this are prefilled remotely."
)
MODE_NOW = Gauge("prfaas_router_mode", "1 for the mode of routing in force, 0 for the others.", (MODE,))
LEADS = Gauge("prfaas_router_leads", "1 on the router that runs the slow loop.")
ROUTER_PLAN_EPOCH = Gauge("prfaas_router_plan_epoch", "Epoch of the plan in force; 0 without one.")
LINK_FAILURES = Counter(
    "prfaas_router_link_failures_total",
    "Connections to workers that failed: nobody there, another life or another role there, or a certificate refused.",
)
LINK_CONNECTIONS = Counter("prfaas_router_link_connections_total", "Connections to workers that were made.")
LINK_COMMANDS = Counter("prfaas_router_link_commands_total", "Commands sent to workers.")
LINK_COMMAND_MESSAGES = Counter(
    "prfaas_router_link_command_messages_total", "Messages that those commands were sent in, several in one."
)
LINK_EVENTS = Counter("prfaas_router_link_events_total", "Events that came from workers, batches of tokens included.")
LINK_EVENT_MESSAGES = Counter(
    "prfaas_router_link_event_messages_total", "Messages that those events came in, several in one."
)
LINK_LATE_EVENTS = Counter(
    "prfaas_router_link_late_events_total",
    "Events of those that belong to attempts which were released or never known.",
)
_LINK = (REGION, PEER_REGION)
LINK_CAPACITY = Gauge(
    "prfaas_router_link_capacity_bytes_per_second",
    "What the link from peer_region into region is taken to carry; NaN while unknown.",
    _LINK,
)
LINK_GOODPUT = Gauge("prfaas_router_link_goodput_bytes_per_second", "KV coming from peer_region into region.", _LINK)
LINK_UTILIZATION = Gauge(
    "prfaas_router_link_utilization_ratio", "Goodput over capacity of a link; NaN while unknown.", _LINK
)
LINK_QUEUE = Gauge("prfaas_router_link_queued_bytes", "KV in peer_region that waits to leave for region.", _LINK)
LINK_QUEUE_AGE = Gauge(
    "prfaas_router_link_queue_age_seconds", "How long the oldest of that KV has been waiting.", _LINK
)
LINK_RTT = Gauge(
    "prfaas_router_link_rtt_seconds", "Round trip of a link as its senders measure it; NaN while unknown.", _LINK
)
LINK_RETRANSMITTED = Gauge(
    "prfaas_router_link_retransmitted_ratio",
    "Of the bytes that went out on a link, what TCP had sent before; NaN while unknown.",
    _LINK,
)

TENANT = Label("tenant")
REFUSED_REQUESTS = Counter(
    "prfaas_router_admission_refused_total",
    "Requests that were not let in. key: no key that is known; model: the key is not good for it; size, requests,"
    " tokens, concurrency: limits of the tenant; queue, share, wait: too many wait, or wait too long; deadline: the"
    " time to the first token could not be kept.",
    (TENANT, Label("reason", ("key", "model", *_values(Limit)))),
)
REQUEST_LOG_LINES = Counter(
    "prfaas_router_request_log_lines_total",
    "Lines for the request log. dropped: too many waited to be written; failed: the file could not be written.",
    (Label("outcome", ("written", "dropped", "failed")),),
)
ADMISSION_WAIT = Histogram(
    "prfaas_router_admission_wait_seconds", "How long requests that were let in waited for their turn.", _TTFT_S
)
ADMISSION_ADMITTED = Counter("prfaas_router_admission_admitted_total", "Requests that were let in.", (TENANT,))
ADMISSION_QUEUED = Gauge("prfaas_router_admission_queued_requests", "Requests that wait for their turn.")
ADMISSION_QUEUED_TOKENS = Gauge(
    "prfaas_router_admission_queued_tokens", "Tokens of those, of their prompts and to be generated."
)
ADMISSION_RUNNING_TOKENS = Gauge(
    "prfaas_router_admission_running_tokens", "The same of the requests that are being served."
)
TENANT_TOKENS = Counter(
    "prfaas_router_tenant_tokens_total",
    "Tokens of routed prompts and of answers, by tenant.",
    (TENANT, Label("kind", ("prompt", "output"))),
)
KEYS_LOADED = Counter(
    "prfaas_router_key_file_reads_total",
    "How often the file of API keys was read because it had changed; failed ones left the old keys in force.",
    (Label("outcome", ("ok", "failed")),),
)
KEYS = Gauge("prfaas_router_api_keys", "API keys in force; 0 on an open endpoint.")

#: Of what was found in a cache: how far the KV reaches, and the last state within it, where a prefill can go on.
CACHE_KIND = Label("kind", ("kv", "joint"))
CACHE_MATCHED_TOKENS = Counter(
    "prfaas_router_cache_matched_tokens_total",
    "Prompt tokens that the index had for the region of the chosen prefill node: KV, and KV with a state to resume at.",
    (CACHE_KIND,),
)
CACHED_TOKENS = Counter(
    "prfaas_router_cached_tokens_total",
    "Prompt tokens that prefill took from a cache, as it reported; over prompt tokens this is the prefill skip rate.",
)
CACHE_ERROR = Histogram(
    "prfaas_router_cache_error_tokens",
    "How far off the index was for requests that it had a prefix of or that reported one. over: it promised more than"
    " prefill took from the cache; under: less; in bucket 0: neither.",
    (0.0, *_TOKENS),
    (Label("sign", ("over", "under")),),
)
PULLS = Counter(
    "prfaas_router_pulls_total",
    "Routes whose prefill was to bring a prefix from another region's cache, by whether that was worth it and chosen.",
    (Label("outcome", ("chosen", "not_worth_it")),),
)
PULLED_BYTES = Counter(
    "prfaas_router_pulled_bytes_total", "Cached KV brought from another region for a prefill, as it reported."
)
POOL_SHARDS = Gauge(
    "prfaas_router_pool_shards",
    "Shards of the cache pool by what the index has of them. Only current ones count in routes; held ones are complete,"
    " but cannot be heard.",
    (REGION, Label("state", ("current", "syncing", "held", "stale"))),
)
POOL_INDEX_AGE = Gauge(
    "prfaas_router_pool_index_age_seconds", "Since the shard of a region that was silent longest last spoke.", (REGION,)
)
POOL_INDEX_BYTES = Gauge("prfaas_router_pool_index_bytes", "About what memory the index takes, all regions together.")
POOL_INDEX_FORGOTTEN = Counter(
    "prfaas_router_pool_index_forgotten_blocks_total", "Blocks that the index forgot so as not to exceed its bytes."
)
POOL_UPDATES = Counter("prfaas_router_pool_updates_total", "Messages of the pools about their indexes.", (REGION,))
POOL_UPDATE_BYTES = Counter("prfaas_router_pool_update_bytes_total", "Bytes of these messages.", (REGION,))
POOL_STALE = Counter(
    "prfaas_router_pool_stale_total",
    "Times that what the index had of a shard became stale, by why.",
    (Label("reason", ("gap", "backward", "incarnation", "snapshot", "malformed", "silent", "disconnected")),),
)

_PEER = (PEER_REGION,)
WORKER_CACHE_LOOKUPS = Counter(
    "prfaas_worker_cache_lookups_total",
    "Look-ups in the region's pool, by what they came to.",
    (Label("outcome", ("hit", "miss", "failed")),),
)
WORKER_CACHE_LOOKED_UP_TOKENS = Counter(
    "prfaas_worker_cache_looked_up_tokens_total", "Prompt tokens that prefill looked up in the pool."
)
WORKER_CACHE_HIT_TOKENS = Counter(
    "prfaas_worker_cache_hit_tokens_total",
    "Of these, what the pool had: KV, and KV with a state to resume at.",
    (CACHE_KIND,),
)
WORKER_CACHE_WASTED_TOKENS = Counter(
    "prfaas_worker_cache_wasted_tokens_total",
    "Tokens computed although the pool had, or could have had, their KV. alignment: past the last whole block of a"
    " prompt that matched to there; missing_state: past the last state.",
    (Label("cause", ("alignment", "missing_state")),),
)
WORKER_CACHE_SKIPPED_TOKENS = Counter(
    "prfaas_worker_cache_skipped_tokens_total", "Prompt tokens that prefill resumed past instead of computing them."
)
WORKER_CACHE_HELD_TOKENS = Counter(
    "prfaas_worker_cache_held_tokens_total",
    "Tokens whose KV a decode node had from the pool, so that prefill did not send it.",
)
WORKER_CACHE_GETS = Counter(
    "prfaas_worker_cache_gets_total",
    "Transfers from a pool, by how that ended. expired: all had come, but the lease had not held.",
    (Label("outcome", ("done", "failed", "expired")),),
)
WORKER_CACHE_GET_BYTES = Counter(
    "prfaas_worker_cache_get_bytes_total", "KV and states that came from the pool of a region.", _PEER
)
WORKER_CACHE_GET_SECONDS = Histogram(
    "prfaas_worker_cache_get_seconds", "From the look-up of a prefix to all of it being there.", _TTFT_S
)
WORKER_CACHE_PUTS = Counter(
    "prfaas_worker_cache_puts_total",
    "Pieces given to the pool, by how that ended. known: it lacked nothing; dropped: too many were on their way.",
    (Label("outcome", ("published", "known", "refused", "failed", "dropped")),),
)
WORKER_CACHE_PUT_BYTES = Counter("prfaas_worker_cache_put_bytes_total", "KV and states sent to the pool.")
WORKER_CACHE_PULLS = Counter(
    "prfaas_worker_cache_pulls_total",
    "Prefills that were to look in another region's pool as well. longer: it had more, and that was brought.",
    (Label("outcome", ("longer", "no_longer", "failed")),),
)
WORKER_CACHE_PULLED_BYTES = Counter(
    "prfaas_worker_cache_pulled_bytes_total", "Of the bytes that came from pools, those from another region."
)

_CLASS = Label("class", ("prefix", "transfer", "scratch"))
_OBJECT = Label("kind", ("kv", "state"))
POOL_BYTES = Gauge(
    "prfaas_pool_bytes",
    "Memory of the pool by what it is for and by the state of its blocks; with the free bytes this is all of it.",
    (
        _CLASS,
        Label("state", ("reserved", "filling", "sealed", "published", "handed", "evicting", "quarantine")),
    ),
)
POOL_FREE_BYTES = Gauge("prfaas_pool_free_bytes", "Free bytes of the pool's memory.")
POOL_TOTAL_BYTES = Gauge("prfaas_pool_total_bytes", "Bytes of the pool's memory.")
POOL_PADDING_BYTES = Gauge(
    "prfaas_pool_padding_bytes",
    "Bytes of taken blocks that hold nothing, because objects do not fill them.",
    (_OBJECT,),
)
POOL_QUARANTINE_BYTES = Gauge(
    "prfaas_pool_quarantine_bytes", "Memory that is not used again until it is certain that nobody writes to it."
)
POOL_OBJECTS = Gauge("prfaas_pool_objects", "Objects published, in memory or below it.", (_OBJECT,))
POOL_RESIDENT_OBJECTS = Gauge("prfaas_pool_resident_objects", "Of these, those in memory.", (_OBJECT,))
POOL_LOOKUPS = Counter(
    "prfaas_pool_lookups_total", "Look-ups of a prompt.", (Label("outcome", ("hit", "miss", "refused")),)
)
POOL_LOOKED_UP_TOKENS = Counter("prfaas_pool_looked_up_tokens_total", "Tokens that were looked up, within the limits.")
POOL_HIT_TOKENS = Counter(
    "prfaas_pool_hit_tokens_total",
    "Of these, what was there: KV, and for look-ups of a resume KV with a state.",
    (CACHE_KIND,),
)
POOL_WASTED_TOKENS = Counter(
    "prfaas_pool_wasted_tokens_total",
    "KV that a resume could not use. alignment: past the last whole block within the limit; missing_state: past the"
    " last state.",
    (Label("cause", ("alignment", "missing_state")),),
)
POOL_LEASES = Gauge("prfaas_pool_leases", "Leases in force.")
POOL_LEASES_ENDED = Counter(
    "prfaas_pool_leases_ended_total", "Leases that ended, by how.", (Label("how", ("released", "expired")),)
)
POOL_GETS = Counter(
    "prfaas_pool_gets_total",
    "Pieces that were to be sent, by how that ended. damaged: the lower tier had it, but not whole.",
    (Label("outcome", ("sent", "lost", "expired", "no_room", "damaged")),),
)
POOL_GET_SECONDS = Histogram("prfaas_pool_get_seconds", "From being asked for a piece to its receipt.", _TTFT_S)
POOL_PUTS = Counter(
    "prfaas_pool_puts_total",
    "Pieces that were offered, by how that ended. known: nothing of it was missing; abandoned: who offered it could"
    " not send it after all.",
    (Label("outcome", ("published", "known", "no_room", "quota", "lost", "abandoned", "expired")),),
)
POOL_SENT_BYTES = Counter("prfaas_pool_sent_bytes_total", "KV and states sent to a region.", _PEER)
POOL_RECEIVED_BYTES = Counter("prfaas_pool_received_bytes_total", "KV and states that arrived whole and were checked.")
POOL_EVICTED = Counter(
    "prfaas_pool_evicted_total",
    "Objects that left the cache, by why: states that nobody has resumed from, other states, KV at the end of a prompt,"
    " what the lower tier lost, and what only memory had and that was needed.",
    (Label("why", ("unproven", "state", "leaf", "damaged", "unspilled")),),
)
POOL_COOLED = Counter(
    "prfaas_pool_cooled_total", "Copies in memory that were given up while the lower tier keeps the object."
)
POOL_ALARMS = Counter(
    "prfaas_pool_integrity_alarms_total", "Offers of another content under a key that is taken; the old one was kept."
)
POOL_STORE_BYTES = Gauge("prfaas_pool_store_bytes", "Bytes in the tier below memory.")
POOL_STORE_READS = Counter(
    "prfaas_pool_store_reads_total",
    "Objects read from the tier below memory.",
    (Label("outcome", ("read", "missing", "damaged", "failed")),),
)
POOL_STORE_WRITES = Counter(
    "prfaas_pool_store_writes_total",
    "Objects written to the tier below memory. full: it had no room; dropped: too many were waiting; conflict: it has"
    " another content under that key.",
    (Label("outcome", ("written", "full", "failed", "dropped", "conflict")),),
)
POOL_STORE_DAMAGED = Counter(
    "prfaas_pool_store_damaged_total",
    "Objects that the tier below memory had, but not whole: found so at the start or when they were read, and dropped.",
)
POOL_STORE_QUEUE = Gauge("prfaas_pool_store_queue", "Objects that wait to be written to the tier below memory.")
POOL_STORE_READ_SECONDS = Histogram("prfaas_pool_store_read_seconds", "Reading one object from below memory.", _TTFT_S)
POOL_WATCHERS = Gauge("prfaas_pool_watchers", "Routers that follow the index.")
POOL_WATCHERS_DROPPED = Counter(
    "prfaas_pool_watchers_dropped_total", "Routers that read too slowly and have to begin again with a snapshot."
)
POOL_SNAPSHOTS = Counter("prfaas_pool_snapshots_total", "Snapshots of the index that were sent.")
POOL_SEQ = Gauge("prfaas_pool_seq", "Number of the latest message of changes.")
POOL_FAILED_TRANSFERS = Counter(
    "prfaas_pool_failed_transfers_total", "Transfers, in or out, that did not complete.", (CAUSE,)
)
POOL_RPC_REFUSED = Counter(
    "prfaas_pool_rpc_refused_total",
    "handshake: connections that made no call with an acceptable certificate within a few seconds; role: calls that the"
    " certificate's role may not make.",
    (REFUSAL,),
)
POOL_CERTIFICATE_VALID = Gauge(
    "prfaas_pool_certificate_valid_seconds", "How long the certificate in use is still valid; infinite without one."
)

ENGINE_PREFILL_TOKENS = Counter("prfaas_worker_engine_prefill_tokens_total", "Prompt tokens that the engine prefilled.")
DECODE_FORWARDED_TOKENS = Counter(
    "prfaas_worker_decode_forwarded_tokens_total", "Tokens fed to decode steps, prompt tokens included."
)
ACTIVE_SEQUENCES = Gauge("prfaas_worker_engine_active_sequences", "Sequences in the decode batch.")
COMMITTED_TOKENS = Gauge(
    "prfaas_worker_committed_tokens", "What the sequences that were taken on may grow to: prompts and whole answers."
)
QUEUED_PREFILL_TOKENS = Gauge("prfaas_worker_queued_prefill_tokens", "Prompt tokens waiting for prefill.")
KEPT_SEQUENCES = Gauge("prfaas_worker_kept_sequences", "Sequences prefilled here that wait for their decode.")
ENGINE_KV_RATIO = Gauge(
    "prfaas_worker_engine_kv_ratio", "Part of the engine's own KV memory that sequences hold; 0 where it tells of none."
)
ENGINE_OTHERS = Gauge(
    "prfaas_worker_engine_other_sequences", "Sequences that others have at the server that the engine drives."
)
ENGINE_PREFIX_TOKENS = Gauge(
    "prfaas_worker_engine_prefix_tokens", "Tokens of prefixes that the engine keeps in a cache of its own."
)
ENGINE_QUERIED_TOKENS = Counter(
    "prfaas_worker_engine_prefix_queried_tokens_total", "Prompt tokens that the engine looked for in that cache."
)
ENGINE_HIT_TOKENS = Counter(
    "prfaas_worker_engine_prefix_hit_tokens_total", "Prompt tokens that the engine found in that cache."
)
KV_FREE_BYTES = Gauge("prfaas_worker_kv_free_bytes", "Free bytes of the KV pool.")
KV_TOTAL_BYTES = Gauge("prfaas_worker_kv_total_bytes", "Bytes of the KV pool.")
KV_SPANS = Gauge("prfaas_worker_kv_spans", "Spans taken in the KV pool.")
KV_SENT_BYTES = Counter(
    "prfaas_worker_kv_sent_bytes_total", "KV payload that has left for a region, counted as the peers take it.", _PEER
)
KV_RECEIVED_BYTES = Counter(
    "prfaas_worker_kv_received_bytes_total",
    "KV payload of the transfers from a region that arrived whole and were checked.",
    _PEER,
)
KV_RESENT_BYTES = Counter(
    "prfaas_worker_kv_resent_bytes_total",
    "KV payload of delivered transfers that was sent twice because a connection was lost.",
)
KV_RETRANSMITTED_BYTES = Counter(
    "prfaas_worker_kv_retransmitted_bytes_total", "Bytes that TCP sent again toward a region.", _PEER
)
KV_QUEUED_BYTES = Gauge("prfaas_worker_kv_queued_bytes", "KV payload that waits to leave for a region.", _PEER)
KV_UNSENT_BYTES = Gauge("prfaas_worker_kv_unsent_bytes", "Of that, what the kernel has taken and not sent.", _PEER)
KV_QUEUE_AGE = Gauge(
    "prfaas_worker_kv_queue_age_seconds", "How long the oldest KV for a region has been waiting to leave.", _PEER
)
KV_RTT = Gauge(
    "prfaas_worker_kv_rtt_seconds", "Smallest round trip of the open lanes to a region; NaN without any.", _PEER
)
KV_LANES = Gauge("prfaas_worker_kv_lanes", "Lanes open toward a region.", _PEER)
KV_ALLOWED = Gauge(
    "prfaas_worker_kv_allowed_bytes_per_second",
    "What the leader lets this worker send to a region; infinite where it says nothing.",
    _PEER,
)
KV_CONNECTIONS = Gauge("prfaas_worker_kv_connections", "Connections of the KV plane in either direction.")
KV_REFUSED_FRAMES = Counter(
    "prfaas_worker_kv_refused_frames_total", "Frames refused: late, damaged or of an unknown attempt."
)
KV_REFUSED = Counter(
    "prfaas_worker_kv_refused_total",
    "Frames and connections of the KV data plane refused, by what was wrong.",
    (CAUSE,),
)
KV_FAILED_TRANSFERS = Counter(
    "prfaas_worker_kv_failed_transfers_total", "Transfers, in or out, that did not complete.", (CAUSE,)
)
RESERVATIONS = Gauge("prfaas_worker_reservations", "Attempts that hold a place in this worker's admission.")
ADMISSION_REFUSED = Counter("prfaas_worker_admission_refused_total", "Attempts refused for want of room.")
SESSIONS = Gauge("prfaas_worker_sessions", "Token links open to routers.")
RPC_REFUSED = Counter(
    "prfaas_worker_rpc_refused_total",
    "handshake: connections that made no call with an acceptable certificate within a few seconds; role: calls that the"
    " certificate's role may not make.",
    (REFUSAL,),
)
CERTIFICATE_VALID = Gauge(
    "prfaas_worker_certificate_valid_seconds", "How long the certificate in use is still valid; infinite without one."
)
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
    TTFT_TERM,
    TTFT_UNACCOUNTED,
    ITL,
    REQUEST_DURATION,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    UNCACHED_TOKENS,
    ROUTES,
    KV_TRANSFER_BYTES,
    RECOMPUTED_TOKENS,
    ATTEMPTS,
    BREAKERS,
    BREAKERS_OPENED,
    BREAKER_PROBES,
    FULL_SOURCES,
    HEDGES,
    MIGRATIONS,
    MIGRATION_GAP,
    REPLAYED_TOKENS,
    IN_FLIGHT,
    STALLED,
    OLDEST_PROGRESS,
    CANARIES,
    SHUNNED,
    HTTP_CONNECTIONS,
    HTTP_ACCEPTED,
    HTTP_REFUSED,
    HTTP_BODIES,
    TLS_CERTIFICATE_VALID,
    TLS_CERTIFICATES,
    REFUSED_REQUESTS,
    ADMISSION_ADMITTED,
    ADMISSION_WAIT,
    ADMISSION_QUEUED,
    ADMISSION_QUEUED_TOKENS,
    ADMISSION_RUNNING_TOKENS,
    TENANT_TOKENS,
    KEYS,
    KEYS_LOADED,
    REQUEST_LOG_LINES,
    READY,
    VIEW_AGE,
    LIVE_NODES,
    THRESHOLD,
    MODE_NOW,
    LEADS,
    ROUTER_PLAN_EPOCH,
    LINK_CONNECTIONS,
    LINK_FAILURES,
    LINK_COMMANDS,
    LINK_COMMAND_MESSAGES,
    LINK_EVENTS,
    LINK_EVENT_MESSAGES,
    LINK_LATE_EVENTS,
    LINK_CAPACITY,
    LINK_GOODPUT,
    LINK_UTILIZATION,
    LINK_QUEUE,
    LINK_QUEUE_AGE,
    LINK_RTT,
    LINK_RETRANSMITTED,
    CACHE_MATCHED_TOKENS,
    CACHED_TOKENS,
    CACHE_ERROR,
    PULLS,
    PULLED_BYTES,
    POOL_SHARDS,
    POOL_INDEX_AGE,
    POOL_INDEX_BYTES,
    POOL_INDEX_FORGOTTEN,
    POOL_UPDATES,
    POOL_UPDATE_BYTES,
    POOL_STALE,
)
WORKER: tuple[Metric, ...] = (
    ENGINE_PREFILL_TOKENS,
    DECODE_FORWARDED_TOKENS,
    ACTIVE_SEQUENCES,
    COMMITTED_TOKENS,
    QUEUED_PREFILL_TOKENS,
    KEPT_SEQUENCES,
    ENGINE_KV_RATIO,
    ENGINE_OTHERS,
    ENGINE_PREFIX_TOKENS,
    ENGINE_QUERIED_TOKENS,
    ENGINE_HIT_TOKENS,
    KV_FREE_BYTES,
    KV_TOTAL_BYTES,
    KV_SPANS,
    KV_SENT_BYTES,
    KV_RECEIVED_BYTES,
    KV_RESENT_BYTES,
    KV_RETRANSMITTED_BYTES,
    KV_QUEUED_BYTES,
    KV_UNSENT_BYTES,
    KV_QUEUE_AGE,
    KV_RTT,
    KV_LANES,
    KV_ALLOWED,
    KV_CONNECTIONS,
    KV_REFUSED_FRAMES,
    KV_REFUSED,
    KV_FAILED_TRANSFERS,
    RESERVATIONS,
    ADMISSION_REFUSED,
    SESSIONS,
    RPC_REFUSED,
    CERTIFICATE_VALID,
    WORKER_ROLE,
    WORKER_PHASE,
    PLAN_EPOCH,
    ROLE_CHANGES,
    REFUSED_PLANS,
    WORKER_CACHE_LOOKUPS,
    WORKER_CACHE_LOOKED_UP_TOKENS,
    WORKER_CACHE_HIT_TOKENS,
    WORKER_CACHE_WASTED_TOKENS,
    WORKER_CACHE_SKIPPED_TOKENS,
    WORKER_CACHE_HELD_TOKENS,
    WORKER_CACHE_GETS,
    WORKER_CACHE_GET_BYTES,
    WORKER_CACHE_GET_SECONDS,
    WORKER_CACHE_PUTS,
    WORKER_CACHE_PUT_BYTES,
    WORKER_CACHE_PULLS,
    WORKER_CACHE_PULLED_BYTES,
)
POOL: tuple[Metric, ...] = (
    POOL_BYTES,
    POOL_FREE_BYTES,
    POOL_TOTAL_BYTES,
    POOL_PADDING_BYTES,
    POOL_QUARANTINE_BYTES,
    POOL_OBJECTS,
    POOL_RESIDENT_OBJECTS,
    POOL_LOOKUPS,
    POOL_LOOKED_UP_TOKENS,
    POOL_HIT_TOKENS,
    POOL_WASTED_TOKENS,
    POOL_LEASES,
    POOL_LEASES_ENDED,
    POOL_GETS,
    POOL_GET_SECONDS,
    POOL_PUTS,
    POOL_SENT_BYTES,
    POOL_RECEIVED_BYTES,
    POOL_EVICTED,
    POOL_COOLED,
    POOL_ALARMS,
    POOL_STORE_BYTES,
    POOL_STORE_READS,
    POOL_STORE_WRITES,
    POOL_STORE_DAMAGED,
    POOL_STORE_QUEUE,
    POOL_STORE_READ_SECONDS,
    POOL_WATCHERS,
    POOL_WATCHERS_DROPPED,
    POOL_SNAPSHOTS,
    POOL_SEQ,
    POOL_FAILED_TRANSFERS,
    POOL_RPC_REFUSED,
    POOL_CERTIFICATE_VALID,
)
RELAY: tuple[Metric, ...] = (RELAY_BYTES,)

COMPONENTS: Mapping[str, tuple[Metric, ...]] = {"router": ROUTER, "worker": WORKER, "pool": POOL, "relay": RELAY}
