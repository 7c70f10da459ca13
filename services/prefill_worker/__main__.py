"""`prfaas prefill-worker`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings


@click.command("prefill-worker")
@settings("cluster", "store", "kv", "security", "log", own=("worker",), without=("role", "max_fallback_prefills"))
def prefill_worker(config: Config) -> None:
    """Prefill long prompts for another region."""
    from services.prefill_worker.app import run

    run_service(run(config), config.log)


if __name__ == "__main__":
    prefill_worker()
