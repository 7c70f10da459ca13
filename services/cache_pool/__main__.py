"""`prfaas cache-pool`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings

#: The shard has addresses and memory of its own.
OTHERS = ("kv.host", "kv.port", "kv.advertise", "kv.pool_bytes")


@click.command("cache-pool")
@settings("cluster", "store", "kv", "security", "log", own=("pool",), without=OTHERS)
def cache_pool(config: Config) -> None:
    """Keep computed prefixes of a region's prompts: one shard of its cache."""
    from services.cache_pool.app import run

    run_service(run(config), config.log)


if __name__ == "__main__":
    cache_pool()
