"""`prfaas router`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings

#: How workers use the cache.
WORKERS_ONLY = (
    "cache.lookup_timeout_s",
    "cache.get_timeout_s",
    "cache.get_timeout_s_per_token",
    "cache.put_timeout_s",
    "cache.max_puts",
    "cache.lease_ttl_s",
    "cache.checkpoint_tokens",
)


@click.command("router")
@settings(
    "cluster",
    "store",
    "cache",
    "security",
    "log",
    "admission",
    "http",
    "canary",
    own=("router", "routing"),
    without=WORKERS_ONLY,
)
def router(config: Config) -> None:
    """Serve the OpenAI API and send each request where it is best prefilled and decoded."""
    if config.router.workers > 1:
        from services.router.supervisor import supervise

        run_service(supervise(config), config.log)
    else:
        from services.router.app import run

        run_service(run(config), config.log)


if __name__ == "__main__":
    router()
