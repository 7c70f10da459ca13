"""What must hold in a drill, and whether it did: pure.

A request is *disturbed* when it failed, or took much longer than any before the fault. Traffic is right again when the
last disturbed request has ended.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple


class Drill(Enum):
    WAN_CUT = "wan-cut"
    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    STORE_OUTAGE = "store-outage"


class Bound(NamedTuple):
    """`failures`: of requests that were open when the fault came, and of none besides. `right_again_s`: since the
    fault."""

    failures: bool
    right_again_s: float
    remote: bool
    says: str


BOUNDS = {
    Drill.WAN_CUT: Bound(False, 30.0, True, "no request fails; what cannot be sent is prefilled where it decodes"),
    Drill.KILL_PREFILL: Bound(False, 15.0, True, "no request fails; prompts go to another prefill node or stay"),
    Drill.KILL_DECODE: Bound(
        True, 20.0, False, "only requests under way may fail, with an error; all others are served"
    ),
    Drill.STORE_OUTAGE: Bound(False, 15.0, False, "no request fails; nothing changes until the store is back"),
}
#: How much longer than the longest before the fault a request may take and count as undisturbed.
FACTOR, ALLOWANCE_S = 3.0, 1.0


class Sent(NamedTuple):
    """One request of the drill's own. `error` is empty when it was answered, `hung`: it was given up; `wrong`: its
    answer is not the reference's."""

    begun_s: float
    ended_s: float
    path: str = ""
    prefill: str = ""
    decode: str = ""
    error: str = ""
    hung: bool = False
    wrong: bool = False

    @property
    def took_s(self) -> float:
        return self.ended_s - self.begun_s


class Seen(NamedTuple):
    """All of a drill. The fault came between `fault_s` and `struck_s`. `left`: what was not given back, by name; None
    where nobody could be asked. `checked`: answers that were compared with their references."""

    drill: Drill
    target: str
    fault_s: float
    struck_s: float
    sent: Sequence[Sent]
    left: Sequence[str] | None
    checked: int


def report(seen: Seen) -> dict[str, Any]:
    """What was measured, and `broken`: each part of the bound that did not hold, in words."""
    bound, before = BOUNDS[seen.drill], [one for one in seen.sent if one.ended_s <= seen.fault_s]
    since = [one for one in seen.sent if one.ended_s > seen.fault_s]
    limit_s = FACTOR * max((one.took_s for one in before), default=0.0) + ALLOWANCE_S
    disturbed = [one for one in since if one.error or one.took_s > limit_s]
    right_again_s = max((one.ended_s - seen.fault_s for one in disturbed), default=0.0)
    failed = [one for one in since if one.error]
    unexpected = [one for one in failed if not bound.failures or one.begun_s > seen.struck_s]
    broken = []
    if not before or any(one.error for one in before):
        broken.append("requests failed before the fault, or there were none: the drill shows nothing")
    if bound.remote and not any(one.path == "remote" for one in before):
        broken.append("no prompt was prefilled remotely before the fault: the drill shows nothing")
    if not since:
        broken.append("no request was open after the fault: the drill shows nothing")
    if unexpected:
        broken.append(f"{len(unexpected)} requests failed that should not have")
    if hung := sum(one.hung for one in seen.sent):
        broken.append(f"{hung} requests did not end")
    if wrong := sum(one.wrong for one in seen.sent):
        broken.append(f"{wrong} answers were wrong")
    if unchecked := sum(not one.error for one in seen.sent) - seen.checked:
        broken.append(f"{unchecked} answers could not be compared: their references were not answered")
    if right_again_s > bound.right_again_s:
        broken.append(f"traffic was right again after {right_again_s:.1f} s, and not within {bound.right_again_s:g} s")
    if seen.left:
        broken.append(f"not given back: {', '.join(seen.left)}")
    return {
        "drill": seen.drill.value,
        "target": seen.target,
        "bound": bound.says,
        "held": not broken,
        "broken": broken,
        "requests_before": len(before),
        "requests_since": len(since),
        "remote_before": sum(one.path == "remote" for one in before),
        "remote_since": sum(one.path == "remote" for one in since),
        "failed": len(failed),
        "errors": dict(sorted(Counter(one.error for one in failed).items())),
        "hung": hung,
        "wrong": wrong,
        "answers_checked": seen.checked,
        "disturbed": len(disturbed),
        "right_again_seconds": round(right_again_s, 2),
        "right_again_bound_seconds": bound.right_again_s,
        "slowest_before_seconds": round(max((one.took_s for one in before), default=0.0), 2),
        "slowest_since_seconds": round(max((one.took_s for one in since), default=0.0), 2),
        "given_back": None if seen.left is None else not seen.left,
    }
