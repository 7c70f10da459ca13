"""`prfaas decode-worker`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings

#: Index and secret of the cache.
ROUTERS_ONLY = ("cache.secret", "cache.secret_file", "cache.index_bytes", "cache.stale_s")


@click.command("decode-worker")
@settings("cluster", "store", "kv", "cache", "security", "log", own=("worker",), without=ROUTERS_ONLY)
def decode_worker(config: Config) -> None:
    """Decode, and prefill as the role says: a PD node."""
    from services.decode_worker.app import run

    run_service(run(config), config.log)


if __name__ == "__main__":
    decode_worker()
