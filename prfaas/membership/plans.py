"""What the control plane keeps in the store: the plan, who leads, what an operator has pinned or drained, and what each
router sees arrive. JSON like the nodes' records, and as forgiving to read.

One key each for plan, leader and pin, so that a compare-and-put on it decides between two writers; one per router,
under its lease; one per drained node. Each value that is compared names its writer.
"""

from typing import Annotated, Any, Self, TypeVar

import msgspec

from prfaas.cluster import NodeId, Plan
from prfaas.membership.records import IncarnationHex, encode

S = TypeVar("S", bound=msgspec.Struct)

Epoch = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


def plan_key(cluster: str) -> str:
    return f"/prfaas/{cluster}/plan"


def leader_key(cluster: str) -> str:
    return f"/prfaas/{cluster}/leader"


def pin_key(cluster: str) -> str:
    return f"/prfaas/{cluster}/pin"


def drains_prefix(cluster: str) -> str:
    return f"/prfaas/{cluster}/drains/"


def routers_prefix(cluster: str) -> str:
    return f"/prfaas/{cluster}/routers/"


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and the router that made it."""

    epoch: Epoch
    threshold_tokens: Tokens
    shares: dict[str, Share] = {}
    reason: str = ""
    made_by: str = ""

    @classmethod
    def of(cls, plan: Plan, made_by: str) -> Self:
        return cls(
            epoch=plan.epoch,
            threshold_tokens=plan.threshold_tokens,
            shares={node: round(share, 4) for node, share in sorted(plan.shares.items())},
            reason=plan.reason,
            made_by=made_by,
        )

    def to_plan(self) -> Plan:
        shares = {NodeId(node): share for node, share in self.shares.items()}
        return Plan(self.epoch, self.threshold_tokens, shares, self.reason)


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The router that runs the slow loop, under a lease of its own. `since_epoch` is the highest epoch it knew when it
    took over."""

    router: str
    since_epoch: int = 0


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator wants in place of what the loops find. What is None is theirs to decide."""

    threshold_tokens: Tokens | None = None
    mode: str | None = None
    made_by: str = ""


class DrainRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants this life of a node to take nothing new. Its next life is not meant."""

    incarnation: IncarnationHex
    made_by: str = ""


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What arrives at one router, for the slow loop that serves all of them.

    `lengths` has the buckets of the histogram of uncached lengths that are not empty, `[bucket, effective count]`.
    """

    router: str
    arrivals_per_s: float = 0.0
    output_tokens: float | None = None
    lengths: tuple[tuple[int, float], ...] = ()
    admin: str = ""
    seq: int = 0


def read(kind: type[S], value: bytes) -> S | None:
    """None for what is not a record of that kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def readable(record: msgspec.Struct) -> bytes:
    """For values that people read with `etcdctl get`."""
    return msgspec.json.format(encode(record), indent=1)


def plain(record: msgspec.Struct) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(record)
    return tree
