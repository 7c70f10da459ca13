"""`prfaas router`."""

import click

from prfaas.config import Config
from services.running import run_service
from services.settings import settings


@click.command("router")
@settings("cluster", "store", "security", "log", own=("router", "routing"))
def router(config: Config) -> None:
    """Serve the OpenAI API and send each request where it is best prefilled and decoded."""
    from services.router.app import run

    run_service(run(config), config.log)


if __name__ == "__main__":
    router()
