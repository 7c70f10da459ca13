"""Command-line options made from the configuration tree, so that each setting has one name everywhere.

`worker.max_tokens` is `--max-tokens` in the worker's own commands, `PRFAAS_WORKER_MAX_TOKENS` in the environment and
`max_tokens` under `[worker]` in the file.
"""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import click
import msgspec

from prfaas import config
from prfaas.errors import ConfigError

Command = Callable[..., Any]


def settings(*sections: str, own: tuple[str, ...], without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Options for all settings of these sections; those of the `own` sections go without the section's name. The
    command gets one argument, the Config. `without` names settings that mean nothing to it: those of `own` sections by
    their name, others as `section.name`."""

    def decorate(command: Command) -> Command:
        names: dict[str, tuple[str, str]] = {}

        def run(config_file: Path | None, **given: Any) -> None:
            overrides = {names[name]: value for name, value in given.items() if value not in (None, ())}
            try:
                loaded = config.load(config_file, overrides)
            except ConfigError as error:
                raise click.UsageError(str(error)) from error
            command(loaded)

        run.__doc__, wrapped = command.__doc__, run
        for section, field in reversed([*config.fields()]):
            own_name = field.name if section in own else f"{section}.{field.name}"
            if (section in sections or section in own) and own_name not in without:
                name = own_name.replace(".", "_")
                names[name] = (section, field.name)
                wrapped = click.option(f"--{name.replace('_', '-')}", name, **_look(section, field))(wrapped)
        return click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file.")(wrapped)

    return decorate


def _look(section: str, field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """How click shows and reads one setting; the configuration itself checks the value."""
    kind, description = field.type, ""
    if hasattr(kind, "__metadata__"):
        description = " ".join(meta.description for meta in kind.__metadata__ if meta.description)
        kind = kind.__origin__
    if isinstance(kind, UnionType):
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    variable = f"PRFAAS_{section}_{field.name}".upper()
    look: dict[str, Any] = {"default": None, "help": f"{description} [{variable}{_shown(field)}]"}
    if isinstance(kind, type) and issubclass(kind, Enum):
        look["type"] = click.Choice([choice.value for choice in kind])
    elif get_origin(kind) is Literal:
        look["type"] = click.Choice([str(choice) for choice in get_args(kind)])
    elif get_origin(kind) is tuple:
        look["multiple"] = True
    elif get_origin(kind) is dict:
        look["multiple"], look["callback"], look["metavar"] = True, _pairs, "KEY=VALUE"
    else:
        look["metavar"] = kind.__name__.upper()
    return look


def _shown(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default in (msgspec.NODEFAULT, "", (), None):
        return ""
    return f", default {default.value if isinstance(default, Enum) else default}"


def _pairs(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """`region=host:port`, or `host:port` for the key that stands for all others."""
    return {key: value for key, _, value in (text.rpartition("=") for text in values)} or None
