"""The router process: store -> view -> flow -> OpenAI endpoint, the control loops beside it, and its end in the reverse
order."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from prfaas.config import Config, RouterConfig
from prfaas.errors import ConfigError
from prfaas.identities import open_identity
from prfaas.observe.tracing import Tracing, open_tracing
from prfaas.process import StopSignals
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.security import PeerRole
from prfaas.stores import open_store
from prfaas.tokenizer.port import Tokenizer
from prfaas.tokenizer.text import load_tokenizer
from services.router import memory
from services.router.admin import AdminApi
from services.router.admission import Gate
from services.router.admission_keys import LiveKeys
from services.router.control import Control, kept_up
from services.router.explain import remembering
from services.router.listening import Listening
from services.router.live_page.tally import Tally
from services.router.openai.api import OpenAiApi
from services.router.openai.record import Observe
from services.router.openai.settings import OpenAiSettings
from services.router.request_log import RequestLogFile
from services.router.serving import Serving, assemble
from services.router.tenants import Tenants

ADMIN_DRAIN_S = 1.0
#: What a router that is about to stop leaves to others at once.
LEADING = frozenset({"election", "slow loop", "pacing", "canaries"})

log = structlog.get_logger()


async def run(config: Config, serving: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain. One of several processes on the same
    port is given `serving`, which tells its supervisor."""
    memory.return_large_pieces()
    stop = StopSignals(supervised=serving is not None)
    try:
        await _serve(config, stop, serving)
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


async def _serve(config: Config, stop: StopSignals, serving: Callable[[], None] | None) -> None:
    own = config.router
    if not own.model_dir:
        raise ConfigError("router.model_dir", "is required")
    tokenizer = load_tokenizer(Path(own.model_dir))
    await tokenizer.test()
    model = Path(own.model_dir).name
    keys = LiveKeys(Path(config.admission.keys_file)) if config.admission.keys_file else None
    admission, identity = Admission(_admission(config)), open_identity(config.security, PeerRole.ROUTER)
    listening = Listening(config, shared=serving is not None)
    salt, name = Tenants.of(config.cache, config.cluster.name).salt, secrets.token_hex(4)
    tracing = open_tracing("prfaas-router", name)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        stack.push_async_callback(tracing.close)
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        control = Control(config, store, model, name)
        path = assemble(config, model, tokenizer, control, identity, admission, keys, salt)
        path.metrics.listening = listening
        stack.push_async_callback(path.links.close)

        tally = Tally(time.monotonic)
        observe = remembering(control.steering.decisions, tally.besides(_observe(own.request_log, path, salt, stack)))
        gate = Gate(
            admission,
            keys,
            path.metrics,
            path.backend.predicted_ttft_s,
            time.monotonic,
            control.live_routers,
            path.backend.places,
        )
        api = _api(path, tokenizer, gate, observe, tracing)
        pages, metrics_at = await listening.pages(path.backend) or (None, None)
        if pages is not None:
            stack.callback(pages.close)
        server, port = await listening.endpoint(api.handle, api.refused_by_head)
        # A second signal ends the drain, and with it what is still being served.
        stack.push_async_callback(server.cut_off, path.links.close)
        if own.admin_key:
            control.admin = await _administer(own, listening, control, path, admission, tally, stack)
        beside = {
            name: group.create_task(story, name=name)
            for name, story in _beside(config, control, path, keys, listening).items()
        }
        memory.settle()
        stop.ready()
        log.info(
            "router is serving",
            host=own.host,
            port=port,
            router=control.router,
            admin=control.admin or None,
            metrics=metrics_at,
        )
        if serving is not None:
            serving()
        await stop.wait()
        for name in LEADING & beside.keys():
            beside[name].cancel()
        path.backend.draining = True
        await server.drain(own.drain_timeout_s, path.links.close)
        for task in beside.values():
            task.cancel()


def _observe(path: str, serving: Serving, salt: Callable[[str], bytes], stack: AsyncExitStack) -> Observe:
    """Who is told of each request that has ended: the metrics, and a file at the path if there is one."""
    observe: Observe = serving.metrics.request_ended
    if path:
        serving.metrics.request_log = request_log = RequestLogFile(Path(path), salt)
        stack.callback(request_log.close)
        observe = request_log.besides(observe)
    return observe


def _api(path: Serving, tokenizer: Tokenizer, gate: Gate, observe: Observe, tracing: Tracing) -> OpenAiApi:
    return OpenAiApi(
        path.backend,
        tokenizer,
        OpenAiSettings(),
        gate,
        now=time.monotonic,
        wall=time.time,
        new_seed=partial(secrets.randbits, 64),
        observe=observe,
        tracing=tracing,
    )


async def _administer(
    own: RouterConfig,
    listening: Listening,
    control: Control,
    path: Serving,
    admission: Admission,
    tally: Tally,
    stack: AsyncExitStack,
) -> str:
    """Where the operator's interface is."""
    operator = control.operator(path.caches)
    operator.shunned = lambda: {
        **dict.fromkeys(path.links.broken(), "its link is broken"),
        **path.canary.reasons(),
    }
    live = control.live(operator, admission, tally, path.caches)
    admin, port = await listening.admin(AdminApi(operator, own.admin_key, live).handle)
    stack.push_async_callback(admin.drain, ADMIN_DRAIN_S)
    return f"{own.admin_host}:{port}"


def _beside(
    config: Config, control: Control, path: Serving, keys: LiveKeys | None, listening: Listening
) -> dict[str, Coroutine[Any, Any, None]]:
    """What runs beside the serving, by name, until it is cancelled."""
    stories = {
        **control.stories(path.caches),
        "watchdog": path.watchdog.run(),
        "links": path.links.mend(),
    }
    if config.canary.mode == "on":
        stories["canaries"] = kept_up("canaries", path.canaries.run)
    if keys is not None:
        stories["API keys"] = keys.run()
    if listening.tls is not None:
        stories["certificate"] = listening.tls.run()
    return stories


def _admission(config: Config) -> AdmissionParams:
    own = config.admission
    return AdmissionParams(
        max_running=config.router.max_in_flight,
        max_running_tokens=own.max_in_flight_tokens,
        max_queued_requests=own.max_queued_requests,
        max_queued_tokens=own.max_queued_tokens,
        max_wait_s=own.max_wait_s,
        ageing_s=own.ageing_s,
    )
