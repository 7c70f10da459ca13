"""One shard of a region's prefix cache: KV and states of prompts that were computed, for those that begin alike."""

from prfaas.config import Config
from prfaas.node.pool_run import run_pool
from services.cache_pool.servicer import serve_pool


async def run(config: Config) -> None:
    """Serve until a signal; see run_pool."""
    await run_pool(config, serve_pool)
