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


Fault = LinkStep | NodeDeath | StoreOutage | Chances
