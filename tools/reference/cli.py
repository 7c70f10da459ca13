"""`docs/reference/cli.md`, from the commands themselves."""

from collections.abc import Iterator

import click

from prfaas import config
from services.cli import main
from tools.reference.table import code, table

INTRODUCTION = """# Command line

Generated from the commands of `prfaas` by `make docs`; `prfaas COMMAND --help` says the same on a terminal.

Exit codes: 0 done; 1 it failed while running; 2 the command line or the configuration is wrong. SIGTERM lets a service
finish what it has, a second one stops it.
"""
VARIABLES = {f"PRFAAS_{section}_{field.name}".upper(): section for section, field in config.fields()}


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(path, command) for path, command in commands("prfaas", main))])


def commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its whole name."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in sorted(command.commands):
        yield from commands(f"{path} {name}", command.commands[name])


def _section(path: str, command: click.Command) -> str:
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    options = [each for each in command.params if isinstance(each, click.Option)]
    settings = [each for each in options if _setting(each)]
    own = [each for each in options if not _setting(each)]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *(_argument(each) for each in arguments)])
    parts = [f"## {path}", "", f"    {usage}", "", *_paragraphs(command), ""]
    if own:
        prefix = command.context_settings.get("auto_envvar_prefix")
        head = ("option", "value", "default", "meaning", *(["variable"] if prefix else []))
        rows = [
            (
                _names(each),
                _value(each),
                _default(each),
                each.help or "",
                *([_variable(each, prefix)] if prefix else []),
            )
            for each in own
        ]
        parts += [table(head, rows), ""]
    if settings:
        parts += [*_settings(settings), ""]
    return "\n".join(parts)


def _paragraphs(command: click.Command) -> list[str]:
    """Click ends a paragraph at an empty line, and so does Markdown."""
    text = (command.help or "").split("\f")[0].strip()
    return [" ".join(line.split()) if line.strip() else "" for line in text.split("\n")]


def _setting(option: click.Option) -> str | None:
    """The variable of the setting that this option is, if it is one. Options name their variable in brackets."""
    _, bracket, said = (option.help or "").rpartition(" [")
    variable = said.rstrip("]").split(",")[0]
    return variable if bracket and variable in VARIABLES and option.envvar is None else None


def _settings(options: list[click.Option]) -> Iterator[str]:
    """Settings by the section of the configuration that they are in, and that says what they mean."""
    yield "Settings as options:"
    yield ""
    sections: dict[str, list[str]] = {}
    for option in options:
        sections.setdefault(VARIABLES[_setting(option) or ""], []).append(code(option.opts[0]))
    for section, names in sections.items():
        yield f"- [{section}](configuration.md#{section}): {', '.join(names)}"


def _argument(argument: click.Argument) -> str:
    name = argument.make_metavar(click.Context(click.Command("prfaas")))
    return name if argument.required else f"[{name.strip('[]')}]"


def _names(option: click.Option) -> str:
    return ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))


def _variable(option: click.Option, prefix: str) -> str:
    return code(option.envvar if isinstance(option.envvar, str) else f"{prefix}_{option.name}".upper())


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    several = ", repeated" if option.multiple else ""
    if isinstance(option.type, click.Choice):
        return ", ".join(code(str(choice)) for choice in option.type.choices) + several
    return code(option.metavar or option.type.name.upper()) + several


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    # What has none holds a mark of click's own.
    plain = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    if isinstance(option.default, bool) and option.secondary_opts:
        return code((option.opts if option.default else option.secondary_opts)[0])
    return code(str(option.default)) if plain else ""
