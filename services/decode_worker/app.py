"""The PD node: it decodes, receives KV from prefill workers and other PD nodes, and prefills while its role says so.

Its role is the configuration's until it has read a plan. With role `decode` it still accepts a bounded number of
prefills: those that failed elsewhere end here.
"""

from functools import partial

from prfaas.cluster import NodeKind, Role
from prfaas.config import Config
from prfaas.flows.convert_role import ConvertParams
from prfaas.live.role_ports import follow_roles
from prfaas.node.admission import Limits
from prfaas.node.link_server import Runtime
from prfaas.node.run import run_worker
from prfaas.node.worker import Worker


async def run(config: Config) -> None:
    """Serve until a signal; see run_worker."""
    own = config.worker
    limits = Limits(
        max_sequences=own.max_sequences,
        max_tokens=own.max_tokens,
        max_prefill_tokens=own.max_prefill_tokens,
        max_prefills=own.max_sequences if Role(own.role).prefills else own.max_fallback_prefills,
    )
    params = ConvertParams(drain_timeout_s=own.role_drain_timeout_s, on_drain_timeout=own.on_role_drain_timeout)
    await run_worker(config, NodeKind.PD, limits, _everything, partial(follow_roles, params=params))


def _everything(worker: Worker) -> Runtime:
    return worker
