"""Types of options that several commands share: what cannot be used is refused before anything is done with it."""

import math
import urllib.parse
from typing import Any

import click


class Finite(click.FloatRange):
    """A range that has neither NaN nor infinity in it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


def http_url(value: str) -> str:
    """Where a server is. A path is left as it is."""
    try:
        parts = urllib.parse.urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no URL: {error}") from None
    if not good or not value.isascii() or not value.isprintable() or " " in value:
        raise click.BadParameter(f"{value!r} is no URL as http://host:port.")
    return value


def bearer_key(value: str) -> str:
    """A key that a header can carry."""
    if not value.isascii() or not value.isprintable():
        raise click.BadParameter("it has characters that a key cannot have.")
    return value
