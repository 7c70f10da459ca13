"""The base of all sections of a scenario: frozen, named fields only, and a key that nobody knows is an error."""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

#: Beyond any study, and far below what no run would reach the end of.
LONGEST_S = 1e9
MOST_TOKENS = 1 << 24

Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
#: Seconds that may be none.
Lapse = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


def not_finite(value: Any, where: str = "") -> str | None:
    """The path of a number in a tree that is infinite or none, as msgspec would name it."""
    match value:
        case float():
            return None if math.isfinite(value) else where
        case dict():
            below = [not_finite(each, f"{where}.{key}" if where else str(key)) for key, each in value.items()]
        case list() | tuple():
            below = [not_finite(each, f"{where}[{place}]") for place, each in enumerate(value)]
        case _:
            return None
    return next((path for path in below if path is not None), None)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass
