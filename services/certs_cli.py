"""`prfaas certs`: certificates for services that ask each other who they are."""

import json
from pathlib import Path

import click

from prfaas.security import PeerRole
from services import certificates


@click.group()
def certs() -> None:
    """Certificates of the services."""


@certs.command("init")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", "hosts", multiple=True, metavar="NAME_OR_IP", help="Also valid for this host. Repeatable.")
@click.option(
    "--days", default=365.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="How long valid."
)
@click.option("--force", is_flag=True, help="Replace the authority and all certificates that are there.")
def certs_init(directory: Path, hosts: tuple[str, ...], days: float, force: bool) -> None:
    """Make a certificate authority in DIRECTORY, and a certificate for each role. Good for tests and trials."""
    if not force and (there := certificates.existing(directory)):
        raise click.UsageError(f"{there[0]} exists: --force replaces the authority and all certificates")
    try:
        certificates.write_all(directory, hosts, days)
    except (OSError, ValueError, OverflowError) as error:
        raise click.ClickException(f"{directory}: {error}") from error
    roles = ", ".join(role.value for role in PeerRole)
    click.echo(f"wrote an authority and certificates for {roles} to {directory}")


@certs.command("show")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per certificate.")
def certs_show(file: Path, as_json: bool) -> None:
    """Print subject, names, roles and expiry of the certificates in FILE."""
    try:
        shown = certificates.show(file)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{file}: {error}") from error
    for each in shown:
        facts = {
            "subject": each.subject,
            "issuer": each.issuer,
            "names": list(each.names),
            "roles": list(each.roles),
            "expires": each.not_after.isoformat(),
            "expired": each.expired,
        }
        click.echo(json.dumps(facts) if as_json else "\n".join(_lines(facts)))


def _lines(facts: dict[str, object]) -> list[str]:
    """One fact per line; lists with commas."""
    return [
        f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in facts.items()
    ]
