"""The configuration: one frozen tree, read once. Code receives its own section, never the tree.

Order of precedence: command line, environment (`PRFAAS_<SECTION>_<FIELD>`), file (TOML), default. Unknown keys are
errors that name the path.
"""

import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prfaas.errors import ConfigError
from prfaas.flows.convert_role import OnDrainTimeout
from prfaas.flows.failures import OnPrefillFailure
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.request import Mode
from prfaas.security import Plane, Protection, check_exposure, check_files

SECRET_FIELDS = frozenset({"password", "admin_key", "secret"})
MASK = "********"
#: Variables of ours that are no settings: the launcher's mark, and the admin commands' key and address.
OTHER_VARIABLES = frozenset({"PRFAAS_LAUNCHED", "PRFAAS_ADMIN", "PRFAAS_ADMIN_KEY"})


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ClusterConfig(_Section, frozen=True):
    name: Annotated[str, Meta(description="Prefix of this cluster's keys in the store.")] = "default"
    pd_region: Annotated[str, Meta(description="Region that decodes; prefill elsewhere is remote.")] = "b"


class StoreConfig(_Section, frozen=True):
    endpoints: Annotated[tuple[str, ...], Meta(description="host:port of each etcd member.")] = ("127.0.0.1:2379",)
    ca: Annotated[str, Meta(description="CA certificate (PEM file) of the members; empty: no TLS.")] = ""
    cert: Annotated[str, Meta(description="Client certificate (PEM file) for mTLS.")] = ""
    key: Annotated[str, Meta(description="Private key (PEM file) of that certificate.")] = ""
    username: Annotated[str, Meta(description="etcd user; empty: no authentication.")] = ""
    password: Annotated[str, Meta(description="etcd password.")] = ""
    lease_ttl_s: Annotated[
        float,
        Meta(gt=0, description="Membership lease. Shorter notices a lost node sooner, but breaks on store hiccups."),
    ] = 30.0


class RoutingConfig(_Section, frozen=True):
    threshold_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="t to start with: prompts with more uncached tokens than this are prefilled remotely. A plan in"
            " the store, also one from before a restart, wins; `prfaas threshold --pin` holds t against both.",
        ),
    ] = 2048
    mode: Annotated[
        Mode, Meta(description="auto: the length rule; always, never: prefill remotely whatever can be, or nothing.")
    ] = Mode.AUTO
    t_min_tokens: Annotated[
        int, Meta(ge=0, description="t never falls below; prompts up to this always stay in the PD region.")
    ] = 0
    t_force_tokens: Annotated[
        int | None,
        Meta(description="t never rises above; longer prompts always leave the PD region. Absent: no limit."),
    ] = None
    ttft_slo_s: Annotated[
        float | None,
        Meta(description="A request that would miss this TTFT goes the other way if that keeps it. Absent: never."),
    ] = None
    bandwidth: Annotated[
        Literal["auto", "scarce", "abundant"],
        Meta(
            description="scarce: only the PD region's cache counts; abundant: the longer cache of both regions counts;"
            " auto: as the links' use says."
        ),
    ] = "auto"
    lines: Annotated[
        dict[str, float], Meta(description="Bytes per second bought from a prefill region to this one, per region.")
    ] = {}
    line_share: Annotated[
        float,
        Meta(
            gt=0, le=1, description="Share of each of these lines that KV may take; more of it makes queues and loss."
        ),
    ] = 0.95
    rtts_s: Annotated[
        dict[str, float], Meta(description="Round trip time to a prefill region, per region. Absent: as measured.")
    ] = {}
    profiles: Annotated[
        dict[str, str],
        Meta(description="What workers' hardware names mean: MODEL/HARDWARE of a shipped profile, or a JSON file."),
    ] = {}
    report_s: Annotated[float, Meta(gt=0, description="Period of the fast loop; nodes report about once a second.")] = (
        1.0
    )
    rebalance: Annotated[
        Literal["on", "off"], Meta(description="Whether the leader plans threshold and roles by itself.")
    ] = "on"
    slow_period_s: Annotated[
        float,
        Meta(gt=0, description="Period of the slow loop. Shorter follows demand sooner and changes roles more often."),
    ] = 120.0
    roles: Annotated[
        Literal["whole", "mixed"],
        Meta(description="whole: a PD node prefills or decodes; mixed: some divide their time, within itl_slo_s."),
    ] = "whole"
    itl_slo_s: Annotated[float, Meta(gt=0, description="Longest time per token that roles are planned for.")] = 0.025
    role_dwell_s: Annotated[
        float, Meta(gt=0, description="A node keeps its role for at least this long. Shorter follows demand sooner.")
    ] = 120.0
    role_warm_up_s: Annotated[
        float, Meta(gt=0, description="What a node reports this soon after a change of role is not planned with.")
    ] = 60.0
    demand_half_life_s: Annotated[
        float, Meta(gt=0, description="Age at which a request counts half in what the slow loop plans for.")
    ] = 300.0


class RouterConfig(_Section, frozen=True):
    host: Annotated[str, Meta(description="Address of the OpenAI endpoint.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the OpenAI endpoint; 0 takes a free one.")] = 8000
    model_dir: Annotated[str, Meta(description="Model folder, for its tokenizer and chat template.")] = ""
    max_attempts: Annotated[int, Meta(ge=1, description="Tries at one request before its first token.")] = 3
    max_migrations: Annotated[
        int,
        Meta(
            ge=0,
            description="Tries, after its first token, to go on with a stream elsewhere when its decode node is lost."
            " More outlives more failures; a request that kills its nodes kills one more with each. 0: the stream ends"
            " with an error.",
        ),
    ] = 3
    migration_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time that takes, each time, until the next token; then the stream ends."),
    ] = 30.0
    reserve_timeout_s: Annotated[float, Meta(gt=0, description="Wait for room on a decode node.")] = 5.0
    prefill_timeout_s: Annotated[float, Meta(gt=0, description="Wait for prefill and transfer of one attempt.")] = 60.0
    prefill_timeout_s_per_token: Annotated[
        float,
        Meta(ge=0, description="Added to that wait for each prompt token; long prompts compute and cross longer."),
    ] = 0.002
    on_prefill_failure: Annotated[
        OnPrefillFailure,
        Meta(description="retry: another prefill node, the decode node at last; local: there at once; fail: give up."),
    ] = OnPrefillFailure.RETRY
    prefill_within_objective: Annotated[
        bool,
        Meta(
            description="Give up a prefill elsewhere where that is the last moment to keep routing.ttft_slo_s with one"
            " on the decode node."
        ),
    ] = True
    hedge: Annotated[
        bool,
        Meta(
            description="Begin a prefill that takes much longer elsewhere than usual on a decode node as well; the"
            " first to finish goes on. Better slowest requests for some work done twice."
        ),
    ] = False
    hedge_factor: Annotated[
        float,
        Meta(gt=0, description="Of what 95 of 100 prefills take: when a hedge is begun. Less begins more of them."),
    ] = 1.5
    hedge_share: Annotated[
        float, Meta(gt=0, le=1, description="Of all prefills elsewhere: how many may be hedged at most.")
    ] = 0.05
    first_token_timeout_s: Annotated[float, Meta(gt=0, description="Wait for the first token after hand-off.")] = 60.0
    token_gap_timeout_s: Annotated[float, Meta(gt=0, description="Longest wait between two tokens.")] = 60.0
    no_progress_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A request that gets nowhere for so long beyond the waits above is ended, whatever it is at.",
        ),
    ] = 30.0
    token_link: Annotated[
        Literal["tcp", "grpc"],
        Meta(description="How commands and tokens travel. tcp: plain TCP to workers that have it, else gRPC."),
    ] = "tcp"
    max_in_flight: Annotated[
        int, Meta(ge=1, description="Requests being served at once; more wait (admission). Each holds its prompt.")
    ] = 1024
    drain_timeout_s: Annotated[float, Meta(gt=0, description="How long SIGTERM lets requests finish.")] = 30.0
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes that serve the port, each a whole router: more use more CPUs, and as much more"
            " memory.",
        ),
    ] = 1
    tls_cert: Annotated[
        str,
        Meta(
            description="Certificate chain (PEM file) to serve HTTPS with, read again when it changes; empty: plain"
            " HTTP."
        ),
    ] = ""
    tls_key: Annotated[str, Meta(description="Private key (PEM file) of that certificate, not encrypted.")] = ""
    metrics_host: Annotated[str, Meta(description="Address of metrics_port.")] = "127.0.0.1"
    metrics_port: Annotated[
        int | None,
        Meta(
            description="Port of /metrics, /live and /ready of one process alone, in plain: worker i has this port + i;"
            " 0 takes a free one. Absent: they are at the OpenAI endpoint only, which several workers share.",
        ),
    ] = None
    request_log: Annotated[
        str,
        Meta(
            description="File to add a line of JSON to for each request that has ended, without prompt or answer;"
            " `prfaas sim run --trace` replays it. It may be moved away at any time. Empty: none."
        ),
    ] = ""
    admin_key: Annotated[str, Meta(description="Key of the admin API; empty: there is none.")] = ""
    admin_host: Annotated[str, Meta(description="Address of the admin API.")] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="Port of the admin API; worker i has this port + i. 0 takes a free one."),
    ] = 0


class HttpConfig(_Section, frozen=True):
    """What clients may take of one router process by HTTP, in bytes and in time. Each limit is one connection's, but
    for `max_connections` and `max_bodies_bytes`."""

    max_head_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Request line and headers, and likewise chunk extensions and trailers. More gets 431, and"
            " allows longer cookies and tokens.",
        ),
    ] = 64 << 10
    max_headers: Annotated[int, Meta(ge=8, description="Header lines of a request; more get 431.")] = 128
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Longest request body, which is held in memory whole; a longer one gets 413. 16 MiB is a prompt"
            " of about four million tokens.",
        ),
    ] = 16 << 20
    max_bodies_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Bodies held at once, of all connections together, until their answer begins; what has no room"
            " gets 503.",
        ),
    ] = 1 << 30
    max_pipelined: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests sent ahead of their turn on one connection; more get 503. Their bodies together"
            " take at most max_body_bytes.",
        ),
    ] = 32
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections at once; more get 503. An idle one costs about 6 KiB, with TLS about 30. Fewer"
            " where the system's limit of open files leaves no room for them.",
        ),
    ] = 10_000
    idle_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a connection may stay without a request. Should exceed that of clients and balancers"
            " before it, which else send into a connection that is being closed.",
        ),
    ] = 75.0
    head_timeout_s: Annotated[
        float,
        Meta(gt=0, description="From the first byte of a request to the end of its headers, and for a TLS handshake."),
    ] = 10.0
    body_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="From there to the end of its body. Must allow max_body_bytes over the slowest line served.",
        ),
    ] = 60.0
    write_timeout_s: Annotated[
        float, Meta(gt=0, description="How long a client may read nothing while there is something to send.")
    ] = 60.0
    linger_s: Annotated[
        float,
        Meta(gt=0, description="How long a connection that is being closed may take to read its last response."),
    ] = 2.0


class AdmissionConfig(_Section, frozen=True):
    """Who may use a router, and what it does with more than router.max_in_flight requests."""

    keys_file: Annotated[
        str,
        Meta(
            description="File of API keys and tenants' limits, made by `prfaas keys`; read again when it changes."
            " Empty: the endpoint is open to everybody who reaches it."
        ),
    ] = ""
    max_in_flight_tokens: Annotated[
        int | None,
        Meta(description="Tokens, of prompts and to be generated, being served at once. Absent: no limit."),
    ] = None
    max_queued_requests: Annotated[
        int, Meta(ge=0, description="Requests that wait for others to end; more get 503. Each holds its prompt.")
    ] = 256
    max_queued_tokens: Annotated[
        int, Meta(ge=1, description="The same in tokens, of prompts and to be generated. One request is always let in.")
    ] = 4 << 20
    max_wait_s: Annotated[
        float, Meta(gt=0, description="Longest wait there; what would wait longer gets 503 at once.")
    ] = 30.0
    ageing_s: Annotated[
        float, Meta(gt=0, description="A request that has waited so long counts as of the next better priority.")
    ] = 5.0


class BreakersConfig(_Section, frozen=True):
    """When a source, a pair of prefill and decode node, or a link between regions has failed so often that it is left
    alone for a while. What is slow has failed."""

    window_s: Annotated[float, Meta(gt=0, description="How long an outcome counts. Longer remembers more.")] = 120.0
    min_outcomes: Annotated[
        int, Meta(ge=1, le=1000, description="Fewer outcomes than this never open a breaker. Less is hastier.")
    ] = 4
    failure_share: Annotated[
        float,
        Meta(gt=0, le=1, description="Opens when so many of the latest outcomes, or all of the last few, failed."),
    ] = 0.5
    rest_s: Annotated[
        float, Meta(gt=0, description="First rest before one attempt may try again; each failure doubles it.")
    ] = 1.0
    max_rest_s: Annotated[
        float, Meta(gt=0, description="Longest rest: how long what is well again may stay unused.")
    ] = 60.0
    slow_factor: Annotated[
        float,
        Meta(ge=1, description="Times what was predicted: a prefill that takes longer, by slow_slack_s, is slow."),
    ] = 3.0
    slow_slack_s: Annotated[float, Meta(ge=0, description="See slow_factor; more forgives short prompts more.")] = 1.0
    in_flight: Annotated[
        int,
        Meta(ge=1, description="Prefills that one source may have under way for one router, as long as it keeps up."),
    ] = 256
    least_in_flight: Annotated[
        int, Meta(ge=1, description="How few that becomes when it does not. More wait for a slow source.")
    ] = 2
    stalled_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A link opens when its senders wait for answers and for so long none has come. Less notices a"
            " cut sooner, and takes a pause of a poor line for one.",
        ),
    ] = 0.5

    def __post_init__(self) -> None:
        if self.max_rest_s < self.rest_s:
            raise ValueError("max_rest_s is below rest_s")
        if self.least_in_flight > self.in_flight:
            raise ValueError("least_in_flight is above in_flight")


class CanaryConfig(_Section, frozen=True):
    mode: Annotated[
        Literal["on", "off"],
        Meta(
            description="Whether routers send requests of their own, whose right answers they know, through every"
            " prefill node, and send no others there while those come back wrong."
        ),
    ] = "on"
    period_s: Annotated[
        float,
        Meta(
            gt=0,
            description="How often each prefill node is tried, by one of the routers. Shorter finds damage sooner.",
        ),
    ] = 60.0
    prompt_tokens: Annotated[
        int,
        Meta(ge=2, description="Length of these prompts. Above one chunk of prefill, so that all of the path is used."),
    ] = 640
    output_tokens: Annotated[
        int, Meta(ge=1, description="Tokens that are compared. More find smaller damage, and cost decode steps.")
    ] = 24
    failures: Annotated[
        int,
        Meta(
            ge=1,
            description="Wrong answers in a row after which a node gets no requests, and right ones until it does.",
        ),
    ] = 2
    max_share: Annotated[
        float,
        Meta(gt=0, le=1, description="Of a node's time that canaries may take; they are rarer where they are slow."),
    ] = 0.01
    skip_busy_ratio: Annotated[
        float,
        Meta(gt=0, le=1, description="A node that prefills for more of the time than this is passed over for a while."),
    ] = 0.8


class WorkerConfig(_Section, frozen=True):
    id: Annotated[str, Meta(description="Name of this node, unique in the cluster.")] = ""
    region: Annotated[str, Meta(description="Region this node is in.")] = ""
    role: Annotated[
        Literal["prefill", "decode", "mixed"], Meta(description="Role of a PD node at start; prefill workers have one.")
    ] = "mixed"
    prefill_share: Annotated[
        float, Meta(gt=0, lt=1, description="Share of its time that a mixed node gives to prefill at start.")
    ] = 0.5
    hardware: Annotated[
        str, Meta(description="What this node runs on; names the profile that routers know it by. Empty: unknown.")
    ] = ""
    profile: Annotated[
        str, Meta(description="The profile of that hardware, as in routing.profiles. Only itl_slo_s needs it.")
    ] = ""
    itl_slo_s: Annotated[
        float | None,
        Meta(description="With a profile: decode no more sequences together than keep to this time per token."),
    ] = None
    model_dir: Annotated[str, Meta(description="Model folder, any of the supported families.")] = ""
    engine: Annotated[
        Literal["embedded", "vllm"], Meta(description="embedded: our own, on the CPU; vllm: a vLLM server of its own.")
    ] = "embedded"
    vllm_python: Annotated[str, Meta(description="With engine vllm: the Python that has vLLM installed.")] = "python3"
    vllm_arguments: Annotated[
        tuple[str, ...], Meta(description="With engine vllm: words for its server, such as --dtype and bfloat16.")
    ] = ()
    vllm_server: Annotated[
        str,
        Meta(
            description="With engine vllm: a server on this machine that others start and stop, http://host:port or the"
            " path of its Unix socket. Empty: one of our own."
        ),
    ] = ""
    vllm_bridge: Annotated[
        str, Meta(description="With vllm_server: path of the Unix socket that its connector was given as bridge.")
    ] = ""
    vllm_events: Annotated[
        tuple[str, ...],
        Meta(
            description="With vllm_server: where it publishes its cache events, and where it sends them again, such as"
            " tcp://127.0.0.1:5557. Empty: routers do not know of its cache."
        ),
    ] = ()
    vllm_network: Annotated[
        Literal["none", "nixl"],
        Meta(description="With engine vllm: what carries KV inside the region; none: what carries it between regions."),
    ] = "none"
    vllm_network_address: Annotated[
        str,
        Meta(
            description="With such a network: host:port at which other servers of the region ask this one; "
            "port 0 takes a free one."
        ),
    ] = "127.0.0.1:0"
    rpc_host: Annotated[str, Meta(description="Address the gRPC server binds.")] = "127.0.0.1"
    rpc_port: Annotated[int, Meta(ge=0, le=65535, description="gRPC port; 0 takes a free one.")] = 0
    rpc_advertise: Annotated[str, Meta(description="host:port at which routers reach it; empty: as bound.")] = ""
    link_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the token link on rpc_host; 0 takes a free one.")
    ] = 0
    link_advertise: Annotated[
        str,
        Meta(
            description="host:port at which routers reach it. Empty: as bound; or, with rpc_advertise, nowhere, and"
            " routers take gRPC."
        ),
    ] = ""
    metrics_host: Annotated[str, Meta(description="Address of /metrics, /live and /ready.")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Port of /metrics; 0 takes a free one.")] = 0
    max_sequences: Annotated[
        int, Meta(ge=1, description="Requests reserved or decoding at once. Higher raises throughput and ITL.")
    ] = 64
    max_batch: Annotated[
        int, Meta(ge=1, description="Sequences decoded together. Higher raises throughput and the time per token.")
    ] = 64
    max_tokens: Annotated[
        int, Meta(ge=1, description="Sum of prompt and output tokens of those requests: bounds the engine's memory.")
    ] = 1 << 20
    max_prefill_tokens: Annotated[
        int, Meta(ge=1, description="Prompt tokens waiting for or in prefill; more are refused.")
    ] = 1 << 20
    max_fallback_prefills: Annotated[
        int,
        Meta(ge=1, description="Prefills that a node with role decode still accepts at once, for failed transfers."),
    ] = 8
    drain_timeout_s: Annotated[float, Meta(gt=0, description="How long SIGTERM lets attempts finish.")] = 30.0
    engine_silence_s: Annotated[
        float,
        Meta(
            gt=0,
            description="An engine that says nothing this long, or has work and does none of it for twice as long, is"
            " stuck. Above the longest chunk of prefill.",
        ),
    ] = 60.0
    role_drain_timeout_s: Annotated[
        float,
        Meta(gt=0, description="How long a role that is to be given up may take to finish its work. Above a stream's."),
    ] = 300.0
    on_role_drain_timeout: Annotated[
        OnDrainTimeout,
        Meta(description="abort: keep the role; proceed: change with work left, which then goes on slowly."),
    ] = OnDrainTimeout.ABORT


class KvConfig(_Section, frozen=True):
    pool_bytes: Annotated[int, Meta(ge=1 << 16, description="Shared memory for KV on its way in or out.")] = 1 << 30
    host: Annotated[str, Meta(description="Address the KV plane binds.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="KV port; 0 takes a free one.")] = 0
    advertise: Annotated[
        dict[str, str],
        Meta(description='host:port per peer region; key "" is for all others. Empty: as bound.'),
    ] = {}
    connect_s: Annotated[float, Meta(gt=0, description="Deadline for connecting and greeting.")] = 5.0
    no_progress_s: Annotated[
        float, Meta(gt=0, description="A transfer on which nothing moves this long is given up.")
    ] = 10.0
    congestion: Annotated[
        Literal["bbr", "cubic", ""],
        Meta(description='TCP congestion control of KV. "", or where it is not allowed: the system\'s own.'),
    ] = "bbr"
    min_lanes: Annotated[
        int,
        Meta(
            ge=1,
            le=128,
            description="As many connections to a peer are worth opening on any line. More bear losses on long lines"
            " better.",
        ),
    ] = 8
    max_lanes: Annotated[
        int, Meta(ge=1, le=128, description="Most connections to a peer, however long and fast its line.")
    ] = 16
    lane_idle_s: Annotated[
        float, Meta(gt=0, description="A connection without work is kept this long; opening it costs round trips.")
    ] = 300.0


class CacheConfig(_Section, frozen=True):
    """The prefix cache as routers and workers use it."""

    enabled: Annotated[
        bool, Meta(description="Use the region's cache pool where there is one. Off: every prompt is computed whole.")
    ] = True
    secret: Annotated[
        str,
        Meta(
            description="Keys each tenant's prefixes apart from all others'; the same on all routers. Without it or a"
            " file the cluster's name does, which is no secret. Changing it empties the cache."
        ),
    ] = ""
    secret_file: Annotated[str, Meta(description="File that holds this secret; wins over it.")] = ""
    lookup_timeout_s: Annotated[
        float, Meta(gt=0, description="A look-up in the pool that takes longer is given up, and the prompt computed.")
    ] = 0.5
    get_timeout_s: Annotated[
        float, Meta(gt=0, description="Bringing a cached prefix that takes longer is given up, and computed instead.")
    ] = 10.0
    get_timeout_s_per_token: Annotated[
        float, Meta(ge=0, description="Added to that for each cached token; long prefixes take longer.")
    ] = 0.0005
    put_timeout_s: Annotated[
        float, Meta(gt=0, description="Giving the pool what was computed is given up after this.")
    ] = 30.0
    max_puts: Annotated[
        int, Meta(ge=1, description="Prompts and answers on their way into the pool at once; more are not kept.")
    ] = 32
    lease_ttl_s: Annotated[
        float,
        Meta(gt=0, description="Life of a lease between renewals. Shorter frees the memory of lost nodes sooner."),
    ] = 10.0
    checkpoint_tokens: Annotated[
        int,
        Meta(
            ge=64,
            description="A state is kept every so many tokens, a multiple of 64. Fewer resume nearer, and cost memory.",
        ),
    ] = 8192
    index_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="About what memory a router's index of all pools may take, and as much again its index of what"
            " engines keep by themselves; what was used least is forgotten.",
        ),
    ] = 2 << 30
    stale_s: Annotated[
        float, Meta(gt=0, description="A router does not count on a pool that has been silent for this long.")
    ] = 5.0


class PoolConfig(_Section, frozen=True):
    """One shard of a region's prefix cache."""

    id: Annotated[str, Meta(description="Name of this shard, unique in the cluster.")] = ""
    region: Annotated[str, Meta(description="Region this shard is in.")] = ""
    model_dir: Annotated[str, Meta(description="Model folder; the shard keeps KV of this model only.")] = ""
    rpc_host: Annotated[str, Meta(description="Address the gRPC server binds.")] = "127.0.0.1"
    rpc_port: Annotated[int, Meta(ge=0, le=65535, description="gRPC port; 0 takes a free one.")] = 0
    rpc_advertise: Annotated[str, Meta(description="host:port at which others reach it; empty: as bound.")] = ""
    metrics_host: Annotated[str, Meta(description="Address of /metrics, /live and /ready.")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Port of /metrics; 0 takes a free one.")] = 0
    kv_host: Annotated[str, Meta(description="Address the KV plane binds.")] = "127.0.0.1"
    kv_port: Annotated[int, Meta(ge=0, le=65535, description="KV port; 0 takes a free one.")] = 0
    kv_advertise: Annotated[
        dict[str, str],
        Meta(description='host:port per peer region; key "" is for all others. Empty: as bound.'),
    ] = {}
    memory_bytes: Annotated[int, Meta(ge=1 << 16, description="Shared memory for KV and states.")] = 1 << 30
    store: Annotated[
        Literal["none", "disk", "mooncake"],
        Meta(description="What keeps more than memory holds: nothing, files in a folder, or Mooncake Store."),
    ] = "none"
    disk_dir: Annotated[str, Meta(description="Folder of the disk tier, this shard's alone.")] = ""
    disk_bytes: Annotated[int, Meta(ge=1 << 16, description="Bytes that the disk tier may take.")] = 16 << 30
    mooncake_master: Annotated[str, Meta(description="host:port of mooncake_master.")] = "127.0.0.1:50051"
    mooncake_admin: Annotated[
        str,
        Meta(
            description="host:port of mooncake_master's metrics, which alone lists what is stored. Empty: nothing is"
            " found again after a restart."
        ),
    ] = ""
    mooncake_metadata: Annotated[
        str, Meta(description="Mooncake's metadata server, such as http://127.0.0.1:8080/metadata, or P2PHANDSHAKE.")
    ] = "P2PHANDSHAKE"
    mooncake_host: Annotated[str, Meta(description="Address at which Mooncake's other clients reach this one.")] = (
        "127.0.0.1"
    )
    mooncake_segment_bytes: Annotated[
        int, Meta(ge=0, description="Memory that this shard gives to the Mooncake cluster.")
    ] = 1 << 30
    lease_ttl_s: Annotated[
        float, Meta(gt=0, description="Longest life of a lease of KV between renewals, whatever its holder asks for.")
    ] = 30.0
    put_ttl_s: Annotated[float, Meta(gt=0, description="Longest time that room is held for KV that is being put.")] = (
        60.0
    )
    tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of the memory that one tenant's prefixes may take.")
    ] = 1.0
    drain_timeout_s: Annotated[float, Meta(gt=0, description="How long SIGTERM lets transfers finish.")] = 10.0


class SecurityConfig(_Section, frozen=True):
    mode: Annotated[
        Plane, Meta(description="mtls: services show each other certificates; off: in plain, for loopback.")
    ] = Plane.OFF
    ca: Annotated[str, Meta(description="CA certificate (PEM file) that signed all services' certificates.")] = ""
    cert: Annotated[
        str, Meta(description="Certificate (PEM file) of this service, with its role; re-read when it changes.")
    ] = ""
    key: Annotated[str, Meta(description="Private key (PEM file) of that certificate.")] = ""
    kv: Annotated[
        Protection | None,
        Meta(description="KV on the wire: aes-gcm encrypts, crc32c checks. Absent: aes-gcm with mtls, else crc32c."),
    ] = None
    allow_plain: Annotated[
        bool,
        Meta(description="Bind beyond loopback without mtls: whoever reaches it can use it, read KV and change it."),
    ] = False


class LogConfig(_Section, frozen=True):
    format: Annotated[Literal["json", "text"], Meta(description="json for machines, text for a terminal.")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least severe level shown.")] = (
        "info"
    )


class Config(_Section, frozen=True):
    cluster: ClusterConfig = ClusterConfig()
    store: StoreConfig = StoreConfig()
    routing: RoutingConfig = RoutingConfig()
    router: RouterConfig = RouterConfig()
    http: HttpConfig = HttpConfig()
    admission: AdmissionConfig = AdmissionConfig()
    breakers: BreakersConfig = BreakersConfig()
    canary: CanaryConfig = CanaryConfig()
    worker: WorkerConfig = WorkerConfig()
    kv: KvConfig = KvConfig()
    cache: CacheConfig = CacheConfig()
    pool: PoolConfig = PoolConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()


def fields() -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every setting as (section name, field)."""
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            yield section.name, field


def load(
    path: Path | None = None,
    overrides: Mapping[tuple[str, str], Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration out of file, environment and `overrides` ({(section, field): value}). Raises ConfigError."""
    tree: dict[str, Any] = _read(path) if path else {}
    known = {f"PRFAAS_{section}_{field.name}".upper(): (section, field) for section, field in fields()}
    for name in sorted(name for name in environ if name.startswith("PRFAAS_")):
        if name in known:
            section, field = known[name]
            _put(tree, section, field.name, _parse(environ[name], field.type))
        elif name not in OTHER_VARIABLES:
            raise ConfigError(name, "is no setting")
    for (section_name, field_name), value in (overrides or {}).items():
        _put(tree, section_name, field_name, value)
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ConfigError(where.strip("`.") or "configuration", message) from error
    _check_values(config)
    _check_security(config)
    if config.kv.min_lanes > config.kv.max_lanes:
        raise ConfigError("kv.min_lanes", f"{config.kv.min_lanes} is more than kv.max_lanes = {config.kv.max_lanes}")
    return config


def _check_values(config: Config) -> None:
    """What the types let through and no service could work with."""
    for section in msgspec.structs.fields(Config):
        for name, value in msgspec.structs.asdict(getattr(config, section.name)).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, float) and not math.isfinite(each):
                    raise ConfigError(f"{section.name}.{name}", f"{each} is not a finite number")
    for setting, addresses in (
        ("kv.advertise", config.kv.advertise.values()),
        ("pool.kv_advertise", config.pool.kv_advertise.values()),
        ("worker.rpc_advertise", filter(None, [config.worker.rpc_advertise])),
        ("worker.link_advertise", filter(None, [config.worker.link_advertise])),
        ("pool.rpc_advertise", filter(None, [config.pool.rpc_advertise])),
    ):
        for address in addresses:
            _check_address(setting, address)
    if config.admission.max_in_flight_tokens is not None and config.admission.max_in_flight_tokens < 1:
        raise ConfigError("admission.max_in_flight_tokens", "must be at least 1, or absent for no limit")
    if config.cache.checkpoint_tokens % HASH_UNIT_TOKENS:
        raise ConfigError("cache.checkpoint_tokens", f"is no multiple of {HASH_UNIT_TOKENS}")
    if config.pool.store == "disk" and not config.pool.disk_dir:
        raise ConfigError("pool.disk_dir", "is missing, with pool.store = disk")
    _check_tier(config.pool)
    _check_router(config.router)
    if config.http.max_bodies_bytes < config.http.max_body_bytes:
        raise ConfigError("http.max_bodies_bytes", "is less than http.max_body_bytes: one body alone has no room")


def _check_router(router: RouterConfig) -> None:
    for given, missing in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(router, given) and not getattr(router, missing):
            raise ConfigError(f"router.{missing}", f"is missing, with router.{given}")
    if router.workers > 1 and router.metrics_port is None:
        raise ConfigError(
            "router.metrics_port",
            f"is missing, with router.workers = {router.workers}: the endpoint's /metrics are those of any one of them",
        )
    for name in ("metrics_port", "admin_port"):
        first = getattr(router, name)
        if first is not None and not 0 <= first <= 65535:
            raise ConfigError(f"router.{name}", f"{first} is no port")
        if first and first + router.workers - 1 > 65535:
            raise ConfigError(f"router.{name}", f"{first} leaves no port for the last of {router.workers} workers")


def _check_tier(pool: PoolConfig) -> None:
    """Nothing is kept that the tier below memory does not keep as well."""
    tiers = {
        "disk": "disk_bytes",
        "mooncake": "mooncake_segment_bytes" if pool.mooncake_segment_bytes else "disk_bytes",
    }
    setting = tiers.get(pool.store)
    if setting is not None and getattr(pool, setting) < pool.memory_bytes:
        raise ConfigError(
            f"pool.{setting}",
            f"{getattr(pool, setting)} is less than pool.memory_bytes = {pool.memory_bytes}, which would be of no use:"
            " all that is in memory is in the tier below as well",
        )


def _check_address(setting: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise ConfigError(setting, f"{address!r} is not host:port, with a port from 1 to 65535")


def _check_security(config: Config) -> None:
    own = config.security
    check_files(own.mode, {"security.ca": own.ca, "security.cert": own.cert, "security.key": own.key})
    hosts = {
        "worker.rpc_host": config.worker.rpc_host,
        "kv.host": config.kv.host,
        "pool.rpc_host": config.pool.rpc_host,
        "pool.kv_host": config.pool.kv_host,
    }
    check_exposure(own.mode, own.kv, hosts, allow_plain=own.allow_plain)


def dump(config: Config) -> dict[str, Any]:
    """The whole tree as plain values with secrets masked."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for section in tree.values():
        for name in SECRET_FIELDS & section.keys():
            section[name] = MASK if section[name] else ""
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"not TOML: {error}") from error


def _put(tree: dict[str, Any], section: str, field: str, value: Any) -> None:
    branch = tree.setdefault(section, {})
    if not isinstance(branch, dict):
        raise ConfigError(section, "must be a table")
    branch[field] = value


def _parse(text: str, kind: Any) -> Any:
    """Environment values: lists are comma-separated, tables are `key=value` pairs, the rest is converted by type."""
    base = getattr(kind, "__origin__", kind) if not hasattr(kind, "__metadata__") else kind.__origin__
    origin = getattr(base, "__origin__", base)
    if origin is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    if origin is dict:
        pairs = (item.strip().rpartition("=") for item in text.split(",") if item.strip())
        return {key: value for key, _, value in pairs}
    return text
