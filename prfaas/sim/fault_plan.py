"""What goes wrong, and when: drawn up in the scenario, so that the same goes wrong for every policy."""

from typing import Annotated

from msgspec import Meta

from prfaas.sim.structs import Lapse, Seconds, Section

At = Lapse
Chance = Annotated[float, Meta(ge=0, le=1)]


class LinkStep(Section, frozen=True, tag="link", tag_field="kind"):
    """From `at_s` on the line carries `gbps`; 0 cuts it."""

    at_s: At
    source: str
    target: str
    gbps: Annotated[float, Meta(ge=0, le=1e6)]


class NodeDeath(Section, frozen=True, tag="node", tag_field="kind"):
    """The node dies, and a new one starts in its place after `down_s`; None: never."""

    at_s: At
    node: str
    down_s: Seconds | None = None


class SlowPrefill(Section, frozen=True, tag="slow", tag_field="kind"):
    """From `at_s` on prefills that the node begins take `factor` times as long, on engines with slices; 1 makes it well
    again. One that is slow beyond all measure looks like one that has stopped."""

    at_s: At
    node: str
    factor: Annotated[float, Meta(ge=1, le=1e9)]


class Freeze(Section, frozen=True, tag="freeze", tag_field="kind"):
    """The node stops for `for_s`, and goes on where it was."""

    at_s: At
    node: str
    for_s: Seconds


class Replacement(Section, frozen=True, tag="replacement", tag_field="kind"):
    """An operator drains the node, for at most `drain_s`, and ends it; a new one starts in its place after `down_s`."""

    at_s: At
    node: str
    drain_s: Seconds
    down_s: Seconds


class LeaderChange(Section, frozen=True, tag="leader", tag_field="kind"):
    """Another router leads. The one that led goes on believing that it does, for `stale_s`."""

    at_s: At
    router: Annotated[int, Meta(ge=0)]
    stale_s: Seconds


class BrokenWatch(Section, frozen=True, tag="watch", tag_field="kind"):
    """The router hears nothing of the store for `for_s`, and then of all that there is."""

    at_s: At
    router: Annotated[int, Meta(ge=0)]
    for_s: Seconds


class Repetition(Section, frozen=True, tag="repetition", tag_field="kind"):
    """The router hears of the latest changes in the store once more."""

    at_s: At
    router: Annotated[int, Meta(ge=0)]
    changes: Annotated[int, Meta(ge=1)]


class StoreOutage(Section, frozen=True, tag="store", tag_field="kind"):
    """The store cannot be reached for `for_s`, and comes back with its data or `empty`."""

    at_s: At
    for_s: Seconds
    empty: bool = False


class Chances(Section, frozen=True, tag="chances", tag_field="kind"):
    """From `at_s` on each reservation may be refused, each message lost, each transfer break, each prefill fail."""

    at_s: At
    refuse: Chance = 0.0
    lose: Chance = 0.0
    transfer: Chance = 0.0
    engine: Chance = 0.0


Fault = (
    LinkStep
    | NodeDeath
    | SlowPrefill
    | Freeze
    | Replacement
    | LeaderChange
    | BrokenWatch
    | Repetition
    | StoreOutage
    | Chances
)
