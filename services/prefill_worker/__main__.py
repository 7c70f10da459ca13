"""`prfaas prefill-worker`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings

#: It has one role, and keys, index and their secret are the routers'.
NOT_OURS = (
    "role",
    "max_fallback_prefills",
    "cache.secret",
    "cache.secret_file",
    "cache.index_bytes",
    "cache.stale_s",
)


@click.command("prefill-worker")
@settings("cluster", "store", "kv", "cache", "security", "log", own=("worker",), without=NOT_OURS)
def prefill_worker(config: Config) -> None:
    """Prefill long prompts for another region."""
    from services.prefill_worker.app import run

    run_service(run(config), config.log)


if __name__ == "__main__":
    prefill_worker()
