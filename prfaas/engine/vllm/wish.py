"""What a request to the vLLM server wants of the connector: `kv_transfer_params: {"prfaas": {...}}`."""

from collections.abc import Mapping
from typing import Any

import msgspec

KEY = "prfaas"


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load the first `load` tokens out of the windows that the attempt was granted, instead of computing them; `save`
    what comes to exist into the window that it was granted."""

    attempt: str
    load: int = 0
    save: bool = False


def params_of(wish: Wish) -> dict[str, Any]:
    return {KEY: msgspec.to_builtins(wish)}


def wish_of(params: Mapping[str, Any] | None) -> Wish | None:
    """None for a request that wants nothing, or nothing that makes sense: it is then computed as any other. To raise
    would end the server."""
    if not params or KEY not in params:
        return None
    try:
        wish = msgspec.convert(params[KEY], Wish)
    except msgspec.ValidationError:
        return None
    return wish if wish.load >= 0 else None
