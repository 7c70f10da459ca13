"""`prfaas keys`: API keys, made, listed and revoked. Running routers follow the file."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from prfaas.errors import ConfigError
from services.router import api_keys
from services.router.api_keys import KeyFile, KeyRecord, TenantRecord

file_option = click.option(
    "--file", "path", type=click.Path(path_type=Path, dir_okay=False), required=True, help="TOML (*.toml) or JSON."
)


@click.group()
def keys() -> None:
    """API keys of the router's endpoint."""


@keys.command("add")
@file_option
@click.option("--tenant", required=True, help="Whose key it is. Limits are the tenant's: set them in the file.")
@click.option("--model", "models", multiple=True, help="Good for this model only. Repeatable. [default: all]")
@click.option("--note", default="", help="Anything that tells it from others.")
@click.option("--json", "as_json", is_flag=True, help="Print id, key and tenant as JSON.")
def keys_add(path: Path, tenant: str, models: tuple[str, ...], note: str, as_json: bool) -> None:
    """Make a key and print it: it cannot be shown again."""
    with _editing(path) as write:
        file = api_keys.read(path) if path.exists() else api_keys.empty()
        key_id, key, hashed = api_keys.new_key(file)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        record = KeyRecord(tenant=tenant, hash=hashed, models=models or None, note=note, created=created)
        added: dict[str, Any] = {} if tenant in file.tenants else {"tenants": {tenant: TenantRecord()}}
        added["keys"] = {key_id: record}
        changed = msgspec.structs.replace(
            file, tenants={**file.tenants, **added.get("tenants", {})}, keys={**file.keys, key_id: record}
        )
        text = path.read_text("utf-8") if path.exists() else f'salt = "{file.salt}"\n'
        write(changed, text.rstrip("\n") + "\n" + "".join(_sections(added)))
    click.echo(json.dumps({"id": key_id, "key": key, "tenant": tenant}) if as_json else key)


@keys.command("list")
@file_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per key.")
def keys_list(path: Path, as_json: bool) -> None:
    """Print each key's id, tenant, models, note and date. The keys themselves are nowhere."""
    for key_id, record in _read(path).keys.items():
        facts = {
            "id": key_id,
            "tenant": record.tenant,
            "models": None if record.models is None else list(record.models),
            "note": record.note,
            "created": record.created,
        }
        shown = ", ".join(record.models) if record.models is not None else "all models"
        click.echo(
            json.dumps(facts) if as_json else "  ".join([key_id, record.tenant, shown, record.created, record.note])
        )


@keys.command("revoke")
@file_option
@click.argument("key_id")
def keys_revoke(path: Path, key_id: str) -> None:
    """Take a key out, by its id. Routers refuse it from about a second later."""
    with _editing(path) as write:
        file = api_keys.read(path)
        if key_id not in file.keys:
            raise click.UsageError(f"{path}: there is no key {key_id}")
        left = {each: record for each, record in file.keys.items() if each != key_id}
        write(msgspec.structs.replace(file, keys=left), _without(path.read_text("utf-8"), key_id))
    click.echo(f"revoked {key_id}")


Write = Callable[[KeyFile, str], None]


@contextmanager
def _editing(path: Path) -> Iterator[Write]:
    """One at a time, and the file is replaced as a whole or not at all."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield lambda file, toml: _replace(path, _text(path, file, toml))
        finally:
            os.close(folder)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error


def _read(path: Path) -> KeyFile:
    try:
        return api_keys.read(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


def _text(path: Path, file: KeyFile, toml: str) -> str:
    """The file's new text. TOML was written by a person as well, so its own text is changed, and that has to mean what
    it should."""
    text = toml if api_keys.is_toml(path) else msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"
    if api_keys.parse(path, text) != file:
        raise ConfigError(str(path), "is not laid out as [keys.ID] sections; change it by hand")
    return text


def _sections(added: dict[str, dict[str, msgspec.Struct]]) -> Iterator[str]:
    for table, records in added.items():
        for name, record in records.items():
            values = msgspec.to_builtins(record).items()
            yield "\n".join(["", f"[{table}.{json.dumps(name)}]", *(f"{k} = {_value(v)}" for k, v in values), ""])


def _value(value: object) -> str:
    """Text and lists of it are written alike in JSON and TOML, but for characters beyond the first plane."""
    return json.dumps(value, ensure_ascii=False)


def _without(text: str, key_id: str) -> str:
    """The text of a TOML file without the section of this key."""
    headers = {f"[keys.{key_id}]", f"[keys.{json.dumps(key_id)}]"}
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = line.strip() in headers
        if not inside:
            kept.append(line)
    return "".join(kept)


def _replace(path: Path, text: str) -> None:
    """Readable for its owner, unless it was for others already."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            found = path.stat()
            os.chmod(name, found.st_mode & 0o777)
            os.chown(name, found.st_uid, found.st_gid)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
