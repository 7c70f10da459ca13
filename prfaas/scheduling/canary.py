"""Which pair of nodes a canary goes to next, and whom its answers leave distrusted.

A canary is a prompt that is prefilled on one node and decoded on another, whose right answer is known. One that comes
back wrong, or not at all, accuses both: which of the two it was shows when they are tried with others. So a prefill
node that fails is tried again soon, and with another decode node where there is one. It is distrusted once it has
failed `failures` times in a row. A decode node is once that happened to it while every node that failed on it has
passed on another. Whoever is distrusted goes on being tried, and is trusted again after as many right answers in a row.

What must hold: canaries take no more of a node's time than `max_share`; a node that is too busy is passed over, but not
for ever.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from prfaas.cluster import Incarnation, Node, NodeId


class Verdict(Enum):
    """RIGHT: the answer that was expected. WRONG: another one. FAILED: none, by the fault of neither load nor
    membership. SKIPPED: it could not be tried."""

    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryParams:
    """Each prefill node is tried every `period_s` by one of the routers. `failures`: in a row, until it is distrusted,
    and right answers until it is trusted again. `max_share`: of a node's time. Nodes that prefill for more than
    `skip_busy_ratio` of the time are passed over, at most `MAX_SKIPS` times in a row."""

    period_s: float
    failures: int = 2
    max_share: float = 0.01
    skip_busy_ratio: float = 0.8


#: A node that is always busy is tried all the same, now and then.
MAX_SKIPS = 10
#: Once it has failed, by how much sooner than usual a node is tried again, until it is trusted; its share of time still
#: bounds that.
SOONER = 10.0
#: When nothing is due, or there is nobody to try.
LOOK_S = 1.0


class Probe(NamedTuple):
    prefill: NodeId
    decode: NodeId


@dataclass(slots=True)
class _Trust:
    """`bad` and `good`: in a row, whichever came last. `told`: why it is distrusted. `wrong`: of what was bad since it
    was trusted last, some were answers."""

    life: Incarnation
    bad: int = 0
    good: int = 0
    told: str = ""
    wrong: bool = False


@dataclass(slots=True)
class _Sending(_Trust):
    """Of a prefill node: when it is tried next, how often it was passed over, toward whom it was tried last, and how
    often toward each decode node."""

    due: float = 0.0
    skips: int = 0
    last: NodeId | None = None
    tried: dict[NodeId, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Receiving(_Trust):
    """Of a decode node: who failed on it since it last passed, how often, and which of them have passed elsewhere
    since."""

    failed: Counter[NodeId] = field(default_factory=Counter)
    cleared: set[NodeId] = field(default_factory=set)

    def forget(self, gone: Collection[NodeId]) -> None:
        """They will pass nowhere any more: what is known of them says nothing about this node."""
        for name in self.failed.keys() & gone:
            self.bad -= self.failed.pop(name)
            self.cleared.discard(name)


class Canary:
    """One per router. `spread` draws from 0 to 1: so that routers do not all come at once."""

    def __init__(self, params: CanaryParams, spread: Callable[[], float]) -> None:
        self._params, self._spread = params, spread
        self._prefills: dict[NodeId, _Sending] = {}
        self._decodes: dict[NodeId, _Receiving] = {}
        self._distrusted: frozenset[NodeId] = frozenset()

    @property
    def distrusted(self) -> frozenset[NodeId]:
        """The same object until it changes: every request asks."""
        return self._distrusted

    def reasons(self) -> Mapping[NodeId, str]:
        """Why each of them is."""
        told = {name: trust.told for name, trust in sorted(self._prefills.items()) if trust.told}
        return told | {name: each.told for name, each in sorted(self._decodes.items()) if each.told}

    @property
    def poisoned(self) -> frozenset[NodeId]:
        """Those of them that gave wrong answers, not just none."""
        wrong = frozenset(name for name, each in self._prefills.items() if each.told and each.wrong)
        return wrong | frozenset(name for name, each in self._decodes.items() if each.told and each.wrong)

    def next(self, prefills: Sequence[Node], decodes: Sequence[Node], routers: int, now: float) -> Probe | None:
        """What is due, if anything. Both in an order that is the same while the nodes are."""
        self._meet(prefills, decodes, routers, now)
        due = [node for node in prefills if self._prefills[node.id].due <= now and _partners(node, decodes)]
        if not due:
            return None
        node = min(due, key=lambda each: self._prefills[each.id].due)
        trust = self._prefills[node.id]
        busy = (node.load.prefill_busy_ratio or 0.0) > self._params.skip_busy_ratio
        if busy and trust.skips < MAX_SKIPS:
            trust.skips += 1
            trust.due = now + self._pause_s(routers)
            return None
        return Probe(node.id, self._partner(node, trust, decodes))

    def heard(self, probe: Probe, verdict: Verdict, detail: str, cost_s: float, routers: int, now: float) -> None:
        """`cost_s`: what it took of the time of either node at most."""
        trust, receiving = self._prefills.get(probe.prefill), self._decodes.get(probe.decode)
        if trust is None or receiving is None:
            return
        pause_s = max(self._pause_s(routers), cost_s / self._params.max_share)
        match verdict:
            case Verdict.RIGHT:
                self._passed(probe, trust, receiving)
            case Verdict.WRONG | Verdict.FAILED:
                for one in (trust, receiving):
                    one.wrong |= verdict is Verdict.WRONG
                self._failed(probe, trust, receiving, f"{verdict.value}: {detail}")
            case Verdict.SKIPPED:
                pass
        if trust.bad or trust.told:
            pause_s = max(self._pause_s(routers) / SOONER, cost_s / self._params.max_share)
        trust.due, trust.skips, trust.last = now + pause_s, 0, probe.decode
        self._judge()

    def check(self) -> None:
        trusts: list[_Trust] = [*self._prefills.values(), *self._decodes.values()]
        for trust in trusts:
            assert not (trust.bad and trust.good), "either of the two came last"
        for receiving in self._decodes.values():
            assert receiving.failed.total() == receiving.bad, "who failed is known"
            assert receiving.cleared <= receiving.failed.keys() <= self._prefills.keys(), "and is here"
        assert self.poisoned <= self._distrusted == self.reasons().keys()

    def _passed(self, probe: Probe, trust: _Sending, receiving: _Receiving) -> None:
        both: tuple[_Trust, ...] = (trust, receiving)
        for one in both:
            one.bad, one.good = 0, one.good + 1
            if one.good >= self._params.failures:
                one.told = ""
            one.wrong = one.wrong and bool(one.told)
        receiving.failed.clear()
        receiving.cleared.clear()
        for name, other in self._decodes.items():
            if name != probe.decode and probe.prefill in other.failed:
                other.cleared.add(probe.prefill)
                self._convict(name)

    def _failed(self, probe: Probe, trust: _Sending, receiving: _Receiving, detail: str) -> None:
        trust.bad, trust.good = trust.bad + 1, 0
        receiving.bad, receiving.good = receiving.bad + 1, 0
        receiving.failed[probe.prefill] += 1
        # On a node that is known to be bad itself nobody can fail.
        if trust.bad >= self._params.failures and not receiving.told:
            trust.told = trust.told or f"{detail} (toward {probe.decode})"
        self._convict(probe.decode)

    def _convict(self, name: NodeId) -> None:
        receiving = self._decodes[name]
        if receiving.bad >= self._params.failures and receiving.cleared == receiving.failed.keys():
            receiving.told = receiving.told or f"canaries of {', '.join(sorted(receiving.failed))} fail here alone"
            for prefill in receiving.failed:
                trust = self._prefills[prefill]
                trust.told, trust.bad, trust.wrong = "", 0, False

    def _partner(self, node: Node, trust: _Sending, decodes: Sequence[Node]) -> NodeId:
        """The one that it was tried with least; after a failure another one than then, if there is any."""
        partners = _partners(node, decodes)
        others = [each for each in partners if each.id != trust.last] if trust.bad else partners
        trust.tried = {each.id: trust.tried.get(each.id, 0) for each in partners}
        chosen = min(others or partners, key=lambda each: trust.tried[each.id]).id
        trust.tried[chosen] += 1
        return chosen

    def _meet(self, prefills: Sequence[Node], decodes: Sequence[Node], routers: int, now: float) -> None:
        """A node that has restarted is another one, and so is one that comes back."""
        gone = _gone(self._prefills, prefills)
        for name in gone:
            del self._prefills[name]
        for name in _gone(self._decodes, decodes):
            del self._decodes[name]
        for name, receiving in self._decodes.items():
            receiving.forget(gone)
            self._convict(name)
        for node in prefills:
            if node.id not in self._prefills:
                self._prefills[node.id] = _Sending(node.incarnation, due=now + self._pause_s(routers) * self._spread())
        for node in decodes:
            if node.id not in self._decodes:
                self._decodes[node.id] = _Receiving(node.incarnation)
        self._judge()

    def _pause_s(self, routers: int) -> float:
        return self._params.period_s * max(1, routers)

    def _judge(self) -> None:
        now = frozenset(self.reasons())
        if now != self._distrusted:
            self._distrusted = now


def _gone(known: Mapping[NodeId, _Trust], nodes: Sequence[Node]) -> set[NodeId]:
    """Those known that are not among the nodes, or in another life."""
    lives = {node.id: node.incarnation for node in nodes}
    return {name for name, trust in known.items() if lives.get(name) != trust.life}


def _partners(node: Node, decodes: Sequence[Node]) -> list[Node]:
    return [each for each in decodes if each.id != node.id and node.can_push_to(each) and each.model == node.model]
