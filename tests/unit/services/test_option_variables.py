"""Variables of commands that are no services: an option is also read from PREFIX_ and its name."""

import click
import pytest

from services.cli import main

COMMANDS = {
    name: command for name, command in main.commands.items() if command.context_settings.get("auto_envvar_prefix")
}
#: Shared by several commands.
SHARED = {"PRFAAS_ADMIN", "PRFAAS_ADMIN_KEY", "PRFAAS_API_KEY"}


@pytest.mark.parametrize("name", ["bench", "plan", "status"])
def test_a_variable_has_the_name_of_its_option(name: str):
    """Not that of the parameter behind it, which nobody sees."""
    command = COMMANDS[name]
    prefix = command.context_settings["auto_envvar_prefix"]
    for option in command.params:
        assert isinstance(option, click.Option)
        variable = option.envvar or f"{prefix}_{option.name}".upper()
        asked = option.opts[0].removeprefix("--").replace("-", "_").upper()
        assert variable in {f"{prefix}_{asked}", *SHARED}, option.opts
