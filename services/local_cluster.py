"""A two-region cluster on this machine: one process per service, as an operator would run them, joined by the same
store and wires. `prfaas up`, `prfaas demo` and the tests start it.

Region `a` prefills (the PrfaaS cluster), region `b` holds the PD nodes and the router. With a WAN, the KV path from a
to b goes through `prfaas wan-relay`.
"""

import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO

from prfaas import config as configuration
from prfaas.cluster import ClusterView, RegionId
from prfaas.config import StoreConfig
from prfaas.errors import ConfigError, DeadlineExceeded, PeerUnavailable
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.process import end_all
from prfaas.rpc.identity import Identity
from prfaas.security import PeerRole, Plane
from prfaas.stores import open_store
from services.certificates import pem_files, write_all
from services.free_ports import free_ports
from services.http_client import fetch
from services.router import api_keys
from services.running import LAUNCHED

PREFILL_REGION, PD_REGION = "a", "b"
#: What all workers of a cost model are said to run on.
HARDWARE = "cost-model"
STOP_GRACE_S = 15.0
POLL_S = 0.05
#: By it CUDA's libraries know which GPUs are a process's.
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: How long certificates of a run are valid.
RUN_DAYS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """The line between the regions."""

    mbit: float
    rtt_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """Workers whose engines are vLLM servers. `devices`: each worker sees one of them, in turn; none: it sees all."""

    python: str
    arguments: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        words = (f"--vllm-arguments={word}" for word in self.arguments)
        return ["--engine", "vllm", "--vllm-python", self.python, *words]

    def surroundings(self, worker: int) -> dict[str, str]:
        return {VISIBLE: self.devices[worker % len(self.devices)]} if self.devices else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start. `etcd` names endpoints of a store that runs already; without any, one is embedded here."""

    model_dir: Path
    port: int = 0
    threshold_tokens: int = 2048
    mode: str = "auto"
    rebalance: bool = True
    slow_period_s: float = 120.0
    routers: int = 1
    #: How often routers try each prefill worker with canaries; None: they do not, and all that is counted is users'.
    canary_period_s: float | None = None
    admin_key: str = ""
    #: API keys of the endpoint; None: it is open.
    keys_file: Path | None = None
    #: None: the engine that we have ourselves.
    vllm: Vllm | None = None
    prefill_workers: int = 1
    pd_roles: tuple[str, ...] = ("mixed", "mixed")
    etcd: tuple[str, ...] = ()
    wan: Wan | None = None
    kv_pool_bytes: int = 256 << 20
    #: Shards of the prefix cache in each region, and the memory of each; 0 for no cache. `pool_dir`: where they keep
    #: what memory has no room for, each in a folder of its own.
    pools: int = 0
    pool_bytes: int = 256 << 20
    pool_dir: Path | None = None
    log_format: str = "text"
    log_dir: Path | None = None
    ready_timeout_s: float = 120.0
    cluster: str = "local"
    #: Make certificates for the run, and let every process ask the others for theirs.
    mtls: bool = False
    extra: dict[str, tuple[str, ...]] = field(default_factory=dict)


def check_settings(plan: Plan) -> None:
    """Before anything is started: what the processes would refuse one by one. Raises ConfigError."""
    given = {
        ("cluster", "name"): plan.cluster,
        ("router", "port"): plan.port,
        ("router", "admin_key"): plan.admin_key,
        ("routing", "threshold_tokens"): plan.threshold_tokens,
        ("routing", "mode"): plan.mode,
        ("routing", "slow_period_s"): plan.slow_period_s,
        ("kv", "pool_bytes"): plan.kv_pool_bytes,
        ("pool", "memory_bytes"): plan.pool_bytes,
        ("log", "format"): plan.log_format,
    } | ({} if plan.canary_period_s is None else {("canary", "period_s"): plan.canary_period_s})
    configuration.load(overrides=given, environ={})
    if plan.keys_file is not None:
        api_keys.read(plan.keys_file)
    if not (plan.model_dir / "config.json").is_file():
        raise ConfigError("--model", f"{plan.model_dir} has no config.json")


@dataclass(slots=True)
class LocalCluster:
    """A running cluster. `processes` is by name: router, router-1, ..., prefill-0, decode-0, ..., pool-a-0, pool-b-0,
    ..., wan-relay. `endpoint` is the first router's; `endpoints` and `admin` are those of all routers, by process."""

    plan: Plan
    endpoint: str
    endpoints: dict[str, str]
    admin: dict[str, str]
    store_endpoints: tuple[str, ...]
    metrics: dict[str, str]
    processes: dict[str, asyncio.subprocess.Process]
    #: Where the certificates of the run are, with `mtls`.
    certificates: Path | None
    #: Starts a process that has ended again, under its name.
    start_again: Callable[[str], Awaitable[None]]
    #: Of the embedded store; None where an etcd is used.
    store: EmbeddedStoreServer | None = None

    async def died(self) -> str:
        """Name of the first process that ends by itself."""
        waits = {asyncio.ensure_future(process.wait()): name for name, process in self.processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()


@asynccontextmanager
async def local_cluster(plan: Plan) -> AsyncIterator[LocalCluster]:
    """Start everything, wait until the router can serve, and stop everything at the end. Raises PeerUnavailable when a
    process ends while starting, DeadlineExceeded when the cluster does not become ready."""
    async with AsyncExitStack() as stack:
        certificates = stack.enter_context(_certificates()) if plan.mtls else None
        embedded = None if plan.etcd else await stack.enter_async_context(_embedded_store(certificates))
        store = plan.etcd if embedded is None else (embedded.endpoint,)
        starter = _Starter(plan, store, certificates)
        stack.push_async_callback(starter.stop)
        cluster = await starter.start()
        cluster.store = embedded
        await _ready(cluster)
        yield cluster


@contextmanager
def _certificates() -> Iterator[Path]:
    """A folder with certificates for one run, which nobody else can read."""
    with tempfile.TemporaryDirectory(prefix="prfaas-certificates-") as directory:
        write_all(Path(directory), days=RUN_DAYS)
        yield Path(directory)


@asynccontextmanager
async def _embedded_store(certificates: Path | None) -> AsyncIterator[EmbeddedStoreServer]:
    credentials = None
    if certificates is not None:
        ca, cert, key = pem_files(certificates, PeerRole.STORE)
        credentials = Identity(PeerRole.STORE, ca=ca, cert=cert, key=key).server_credentials(lambda: None)
    server = EmbeddedStoreServer(MemoryStore(), "127.0.0.1", 0, credentials)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class _Starter:
    """Starts the processes in order; `stop` ends whatever was started, also after a failure half-way."""

    def __init__(self, plan: Plan, store: tuple[str, ...], certificates: Path | None) -> None:
        self._plan, self._store, self._certificates = plan, store, certificates
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._metrics: dict[str, str] = {}
        self._endpoints: dict[str, str] = {}
        self._admin: dict[str, str] = {}
        self._logs: list[IO[bytes]] = []
        self._commands: dict[str, tuple[str, ...]] = {}
        self._surroundings: dict[str, dict[str, str]] = {}
        self._profile = cost_table(plan.model_dir)

    async def start(self) -> LocalCluster:
        plan = self._plan
        kv_ports = free_ports(len(plan.pd_roles))
        relay_ports = free_ports(len(plan.pd_roles)) if plan.wan else []
        if plan.wan:
            await self._start_relay(plan.wan, relay_ports, kv_ports)
        for region in pool_regions(plan):
            for number in range(plan.pools):
                await self._start_pool(region, number)
        for number in range(plan.prefill_workers):
            await self._start_worker(
                "prefill-worker", f"prefill-{number}", PREFILL_REGION, "--model-dir", str(plan.model_dir)
            )
        for number, role in enumerate(plan.pd_roles):
            options = ["--role", role, "--model-dir", str(plan.model_dir), "--kv-port", str(kv_ports[number])]
            if relay_ports:
                options += ["--kv-advertise", f"127.0.0.1:{kv_ports[number]}"]
                options += ["--kv-advertise", f"{PREFILL_REGION}=127.0.0.1:{relay_ports[number]}"]
            await self._start_worker("decode-worker", f"decode-{number}", PD_REGION, *options)
        names = ["router", *(f"router-{number}" for number in range(1, plan.routers))]
        for name in names:
            await self._start_router(name, plan.port if name == "router" else 0)
        return LocalCluster(
            plan=plan,
            endpoint=self._endpoints["router"],
            endpoints=self._endpoints,
            admin=self._admin,
            store_endpoints=self._store,
            metrics=self._metrics,
            processes=self._processes,
            certificates=self._certificates,
            start_again=self.spawn_again,
        )

    async def _start_router(self, name: str, port: int) -> None:
        plan, port = self._plan, port or free_ports(1)[0]
        options = ["--port", str(port), "--model-dir", str(plan.model_dir)]
        options += ["--threshold-tokens", str(plan.threshold_tokens), "--mode", plan.mode]
        options += ["--rebalance", "on" if plan.rebalance else "off", "--slow-period-s", str(plan.slow_period_s)]
        canary = ("on", "--canary-period-s", str(plan.canary_period_s)) if plan.canary_period_s else ("off",)
        options += ["--canary-mode", *canary]
        if plan.wan:
            options += ["--lines", f"{PREFILL_REGION}={plan.wan.mbit * 1e6 / 8}"]
            options += ["--rtts-s", f"{PREFILL_REGION}={plan.wan.rtt_ms / 1e3}"]
        if self._profile is not None:
            options += ["--profiles", f"{HARDWARE}={self._profile}"]
        if plan.keys_file is not None:
            options += ["--admission-keys-file", str(plan.keys_file)]
        if plan.admin_key:
            [admin_port] = free_ports(1)
            options += ["--admin-port", str(admin_port)]
            self._admin[name] = f"http://127.0.0.1:{admin_port}"
        await self._spawn("router", name, *options, *self._shared(PeerRole.ROUTER))
        self._endpoints[name] = f"http://127.0.0.1:{port}"
        self._metrics[name] = f"{self._endpoints[name]}/metrics"

    async def _start_relay(self, wan: Wan, relay_ports: list[int], kv_ports: list[int]) -> None:
        [metrics_port] = free_ports(1)
        routes = [
            part
            for ours, theirs in zip(relay_ports, kv_ports, strict=True)
            for part in ("--route", f"127.0.0.1:{ours}=127.0.0.1:{theirs}")
        ]
        line = ["--mbit", str(wan.mbit), "--rtt-ms", str(wan.rtt_ms), "--metrics-port", str(metrics_port)]
        await self._spawn("wan-relay", "wan-relay", *routes, *line)
        self._metrics["wan-relay"] = f"http://127.0.0.1:{metrics_port}/metrics"

    async def _start_worker(self, command: str, name: str, region: str, *options: str) -> None:
        [metrics_port] = free_ports(1)
        self._metrics[name] = f"http://127.0.0.1:{metrics_port}/metrics"
        place = ["--id", name, "--region", region, "--metrics-port", str(metrics_port)]
        pool = ["--kv-pool-bytes", str(self._plan.kv_pool_bytes)]
        hardware = ["--hardware", HARDWARE, "--profile", str(self._profile)] if self._profile is not None else []
        engine = self._engine(name)
        await self._spawn(command, name, *place, *pool, *hardware, *engine, *options, *self._shared(PeerRole(command)))

    def _engine(self, worker: str) -> list[str]:
        if self._plan.vllm is None:
            return []
        self._surroundings[worker] = self._plan.vllm.surroundings(len(self._surroundings))
        return self._plan.vllm.options

    async def _start_pool(self, region: str, number: int) -> None:
        [metrics_port] = free_ports(1)
        plan, name = self._plan, f"pool-{region}-{number}"
        self._metrics[name] = f"http://127.0.0.1:{metrics_port}/metrics"
        options = ["--id", name, "--region", region, "--model-dir", str(plan.model_dir)]
        options += ["--memory-bytes", str(plan.pool_bytes), "--metrics-port", str(metrics_port)]
        if plan.pool_dir is not None:
            options += ["--store", "disk", "--disk-dir", str(plan.pool_dir / name)]
        await self._spawn("cache-pool", name, *options, *self._shared(PeerRole.CACHE_POOL))

    def _shared(self, role: PeerRole) -> list[str]:
        endpoints = [part for endpoint in self._store for part in ("--store-endpoints", endpoint)]
        cluster = ["--cluster-name", self._plan.cluster, "--cluster-pd-region", PD_REGION]
        return [*endpoints, *cluster, *self._security(role), "--log-format", self._plan.log_format]

    def _security(self, role: PeerRole) -> list[str]:
        if self._certificates is None:
            return []
        files = dict(zip(("ca", "cert", "key"), map(str, pem_files(self._certificates, role)), strict=True))
        sections = ["security"] if self._plan.etcd else ["security", "store"]
        named = [part for section in sections for name, file in files.items() for part in (f"--{section}-{name}", file)]
        return ["--security-mode", Plane.MTLS.value, *named]

    async def _spawn(self, command: str, name: str, *options: str) -> None:
        self._commands[name] = (command, *options)
        await self.spawn_again(name)

    async def spawn_again(self, name: str) -> None:
        """Start the process of this name, as it was first started."""
        command, *options = self._commands[name]
        log: IO[bytes] | None = None
        if self._plan.log_dir:
            self._plan.log_dir.mkdir(parents=True, exist_ok=True)
            log = (self._plan.log_dir / f"{name}.log").open("ab")
            self._logs.append(log)
        # Its own session: a Ctrl-C on the terminal reaches the launcher alone, which then stops all in order.
        self._processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.cli",
            command,
            *options,
            *self._plan.extra.get(command, ()),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            # The key goes this way: a command line can be read by everybody.
            env={
                **os.environ,
                **self._surroundings.get(name, {}),
                LAUNCHED: str(os.getpid()),
                "PRFAAS_ROUTER_ADMIN_KEY": self._plan.admin_key,
            },
        )

    async def stop(self) -> None:
        await end_all([*self._processes.values()], STOP_GRACE_S)
        for log in self._logs:
            log.close()


async def _ready(cluster: LocalCluster) -> None:
    """Wait until every worker and every shard of the cache is in the view and the router answers, or something has
    gone wrong."""
    stage, limit_s = "starting the cluster", cluster.plan.ready_timeout_s
    waiting = asyncio.ensure_future(_all_there(cluster))
    dying = asyncio.ensure_future(cluster.died())
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wait({waiting, dying}, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise DeadlineExceeded(stage, limit_s) from None
    finally:
        for task in (waiting, dying):
            task.cancel()
    if dying.done() and not dying.cancelled():
        raise PeerUnavailable(dying.result(), "its process ended while the cluster was starting")
    waiting.result()


async def _all_there(cluster: LocalCluster) -> None:
    plan = cluster.plan
    wanted = plan.prefill_workers + len(plan.pd_roles)
    store = open_store(store_of(cluster))
    follower = ClusterFollower(store, plan.cluster, RegionId(PD_REGION))
    following = asyncio.ensure_future(follower.run())
    try:
        pools = plan.pools * len(pool_regions(plan))
        await follower.wait_for(functools.partial(_has_nodes, wanted, pools), plan.ready_timeout_s)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()
    for endpoint in cluster.endpoints.values():
        while await _nodes_known_to(endpoint) < wanted:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(POLL_S)


def store_of(cluster: LocalCluster) -> StoreConfig:
    """How to speak to the cluster's store, as its router does."""
    if cluster.certificates is None or cluster.plan.etcd:
        return StoreConfig(endpoints=cluster.store_endpoints)
    ca, cert, key = map(str, pem_files(cluster.certificates, PeerRole.ROUTER))
    return StoreConfig(endpoints=cluster.store_endpoints, ca=ca, cert=cert, key=key)


def cost_table(model_dir: Path) -> Path | None:
    """The file that says what a cost model costs, which is then known to the router as a profile. None for a model that
    computes, and for one that takes no time."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return path if config.get("model_type") == "cost_model" and config.get("time_scale", 1.0) > 0 else None


def pool_regions(plan: Plan) -> tuple[str, ...]:
    """Where there are workers that a cache is of use to."""
    return (PREFILL_REGION, PD_REGION) if plan.prefill_workers else (PD_REGION,)


def _has_nodes(wanted: int, pools: int, view: ClusterView) -> bool:
    return len(view.nodes) >= wanted and len(view.pools) >= pools


async def _nodes_known_to(endpoint: str) -> int:
    """How many workers the router sees, by its own metrics; 0 while it does not answer."""
    try:
        status, body = await asyncio.to_thread(fetch, f"{endpoint}/metrics")
    except OSError:
        return 0
    samples = (line.split() for line in body.splitlines() if line.startswith("prfaas_router_live_nodes{"))
    return sum(int(float(value)) for _, value in samples) if status == HTTPStatus.OK else 0
