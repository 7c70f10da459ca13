"""The PrfaaS cluster's worker: it prefills for other nodes and decodes nothing."""

from prfaas.cluster import NodeKind
from prfaas.config import Config
from prfaas.node.admission import Limits
from prfaas.node.run import run_worker
from services.prefill_worker.servicer import PrefillOnly


async def run(config: Config) -> None:
    """Serve until a signal; see run_worker."""
    own = config.worker
    limits = Limits(
        max_sequences=own.max_sequences,
        max_tokens=own.max_tokens,
        max_prefill_tokens=own.max_prefill_tokens,
        max_prefills=own.max_sequences,
    )
    await run_worker(config, NodeKind.PREFILL_WORKER, limits, PrefillOnly)
