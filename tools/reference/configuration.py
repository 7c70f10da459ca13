"""`docs/reference/configuration.md`, from the configuration tree."""

from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from prfaas import config
from tools.reference.table import code, table

INTRODUCTION = """# Configuration

Generated from `prfaas/config.py` by `make docs`. Every setting has four sources; the first that says something wins:

1. an option of the command: in a component's own commands `--port` for its own section, `--store-endpoints` for others
   ([cli.md](cli.md));
2. the environment: `PRFAAS_ROUTER_PORT`. Lists are separated by commas, tables are `key=value` pairs;
3. a TOML file given with `--config`: `port` under `[router]`. Unknown keys are errors that name the path;
4. the default.

`prfaas config check` takes the same sources and says whether they fit together, `prfaas config dump` prints what is in
force, with secrets masked. A name ends with its unit: `_s` seconds, `_bytes`, `_tokens`.
"""


def page() -> str:
    return "\n".join(
        [INTRODUCTION, *(_section(each.name, each.type) for each in msgspec.structs.fields(config.Config))]
    )


def _section(name: str, kind: type[msgspec.Struct]) -> str:
    rows = []
    for field in msgspec.structs.fields(kind):
        variable = f"PRFAAS_{name}_{field.name}".upper()
        rows.append((code(field.name), code(variable), _kind(field.type), _default(field), _described(field)))
    head = ("setting", "environment", "type", "default", "meaning")
    # A struct without a docstring of its own says how it is called.
    about = [" ".join(kind.__doc__.split()), ""] if kind.__doc__ and not kind.__doc__.startswith(kind.__name__) else []
    return "\n".join([f"## {name}", "", *about, table(head, rows), ""])


def _described(field: msgspec.structs.FieldInfo) -> str:
    secret = " Masked when shown." if field.name in config.SECRET_FIELDS else ""
    return " ".join(meta.description for meta in _metas(field.type) if meta.description) + secret


def _metas(kind: Any) -> tuple[msgspec.Meta, ...]:
    return tuple(meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, msgspec.Meta))


def _kind(kind: Any) -> str:
    limits = "".join(_limits(meta) for meta in _metas(kind))
    return _plain(getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind) + limits


def _plain(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(code(str(choice.value)) for choice in kind)
    match get_origin(kind):
        case origin if origin is Literal:
            return ", ".join(code(str(choice)) for choice in get_args(kind))
        case origin if origin is UnionType or origin is Union:
            return " or ".join("absent" if choice is NoneType else _kind(choice) for choice in get_args(kind))
        case origin if origin is tuple:
            return f"list of {_kind(get_args(kind)[0])}"
        case origin if origin is dict:
            return f"table of {_kind(get_args(kind)[1])}"
        case _:
            return str(kind.__name__)


def _limits(meta: msgspec.Meta) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    said = [f"{sign} {getattr(meta, name)}" for name, sign in signs if getattr(meta, name) is not None]
    return f" ({', '.join(said)})" if said else ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else None
    if field.default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    match value:
        case None:
            return "absent"
        case "" | () | {}:
            return "empty"
        case tuple():
            return code(", ".join(map(str, value)))
        case bool():
            return code(str(value).lower())
        case Enum():
            return code(str(value.value))
        case int() if field.name.endswith("_bytes"):
            return f"{code(str(value))}{_binary(value)}"
        case _:
            return code(str(value))


def _binary(value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % size == 0:
            return f" ({value // size} {unit})"
    return ""
