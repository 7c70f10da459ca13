"""One scenario at many settings: every combination of the values given for some of its fields.

A field is named by its path (`control.slow`, `fleets.0.nodes`, `links.*.gbps` for all of a list) or by one of the short
names. Changes are made to the file's tree and read again, so that a value that does not fit is found as in a file.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prfaas.errors import ConfigError
from prfaas.sim.run import run
from prfaas.sim.scenario import Scenario, load, parse

SHORT = {
    "link_gbps": "links.*.gbps",
    "rate_per_s": "workload.arrivals.rate_per_s",
    "threshold_tokens": "policy.threshold_tokens",
    "mode": "policy.mode",
    "rule": "policy.rule",
}

Settings = Mapping[str, Any]


def values_of(text: str) -> tuple[str, list[Any]]:
    """`name=value,value`. Values are JSON where all of them are, else each is JSON or text. Raises ValueError."""
    name, separator, values = text.partition("=")
    if not name or not separator or not values:
        raise ValueError(f"{text!r} is not name=value,value")
    try:
        return name, list(json.loads(f"[{values}]"))
    except json.JSONDecodeError:
        return name, [_value(value.strip()) for value in values.split(",")]


def variants(path: Path, changed: Sequence[tuple[str, Sequence[Any]]]) -> list[tuple[Settings, Scenario]]:
    """What is set, and the scenario that it makes; the last name varies fastest. Raises ConfigError."""
    encoded = msgspec.json.encode(load(path))
    names = [name for name, _ in changed]
    for name, values in changed:
        if sum(SHORT.get(each, each) == SHORT.get(name, name) for each in names) > 1:
            raise ConfigError(name, "set more than once")
        if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
            raise ConfigError(name, "the same value more than once")
    made: list[tuple[Settings, Scenario]] = []
    for values in itertools.product(*(values for _, values in changed)):
        settings = dict(zip(names, values, strict=True))
        tree = msgspec.json.decode(encoded)
        for name, value in settings.items():
            if not _set(tree, SHORT.get(name, name).split("."), value):
                raise ConfigError(name, f"{path} has no such place")
        made.append((settings, parse(tree)))
    return made


def summary(scenario: Scenario) -> dict[str, Any]:
    """What a sweep keeps of a run."""
    return run(scenario).summary


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(place: Any, path: Sequence[str], value: Any) -> bool:
    """Whether there was a place for it. A table that is not there yet is made, an item of a list is not."""
    key, *rest = path
    match place:
        case dict():
            keys: list[Any] = [key]
            if rest and place.get(key) is None:
                place[key] = {}
        case list():
            keys = (
                list(range(len(place))) if key == "*" else [int(key)] if key.isdigit() and int(key) < len(place) else []
            )
        case _:
            return False
    if rest:
        return bool(keys) and all(_set(place[each], rest, value) for each in keys)
    for each in keys:
        place[each] = value
    return bool(keys)
