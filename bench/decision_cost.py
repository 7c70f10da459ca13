"""What one routing decision costs at a thousand nodes, the router's own unreported work included.

    python bench/decision_cost.py [--nodes N] [--decisions N] [--json]

A step is what a router does for a request: lay its own work over the view, choose, charge the route, and later hand
over and discharge. Meanwhile every node reports once a second of the decisions' time, so that the view changes as often
as in a live cluster; folding reports is not counted, it happens once per report and not per request.

After each step a fixed piece of work is timed, SHA-256 of 4 KiB. `yards` is the median of how many of those a step
took: a busy machine slows both, so that this holds where microseconds do not.
"""

import argparse
import hashlib
import json
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace

from prfaas.cluster import (
    ClusterView,
    Incarnation,
    LinkState,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    RegionId,
    Role,
)
from prfaas.membership.ranking import Classes
from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.request import TOKEN_BYTES, AttemptId, Match, Request, RequestId, Sampling
from prfaas.scheduling.overlay import Overlay
from prfaas.scheduling.routing import PREFIX_HOLDERS, RoutingParams, choose

FAR, NEAR = RegionId("far"), RegionId("near")
#: Requests in flight of one router, and decisions per second: both on the high side for one process.
IN_FLIGHT, PER_S = 500, 200
#: The fixed piece of work.
YARD = bytes(4096)
#: Where the prefix that a prompt shares with others has states.
BOUNDARIES = (0, 1024, 2048, 3840)
PARAMS = RoutingParams(
    threshold_tokens=19_400,
    abundant=True,
    ttft_slo_s=10.0,
    profiles={hardware: shipped(CASE_STUDY, hardware) for hardware in ("h200", "h20")},
    links={
        pair: LinkState(*pair, capacity_bytes_per_s=100 * GBPS, goodput_bytes_per_s=13 * GBPS, utilization=0.13)
        for pair in ((FAR, NEAR), (NEAR, FAR))
    },
    rtt_s={(FAR, NEAR): 0.02},
    short_tokens=10_200,
    long_tokens=45_000,
    output_tokens=1024,
)


class Cluster:
    """A third of the nodes prefills elsewhere, the others are PD nodes."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self._chance, self._classes = chance, Classes(NEAR)
        self.nodes: dict[NodeId, Node] = {}
        for index in range(size):
            self._put(self._node(index))

    def report(self, name: NodeId) -> None:
        self._put(replace(self.nodes[name], load=self._load()))

    def view(self) -> ClusterView:
        classes = self._classes
        return ClusterView(
            nodes=self.nodes.copy(),
            remote_prefill=classes.remote_prefill.ids(),
            local_prefill=classes.local_prefill.ids(),
            decode=classes.decode.ids(),
        )

    def _put(self, node: Node) -> None:
        self.nodes[node.id] = node
        self._classes.place(node, load_known=True)

    def _node(self, index: int) -> Node:
        far = index % 3 == 0
        return Node(
            id=NodeId(f"n{index:05}"),
            region=FAR if far else NEAR,
            kind=NodeKind.PREFILL_WORKER if far else NodeKind.PD,
            role=Role.PREFILL if far or index % 8 < 3 else Role.DECODE,
            incarnation=Incarnation(index),
            namespace=Namespace("ns"),
            model="m",
            rpc_address="",
            max_context_tokens=1 << 20,
            hardware="h200" if far else "h20",
            load=self._load(),
        )

    def _load(self) -> NodeLoad:
        return NodeLoad(
            queued_prefill_tokens=self._chance.randrange(100_000),
            active_sequences=self._chance.randrange(20),
            committed_tokens=self._chance.randrange(500_000),
            max_batch=20,
        )


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one decision: laying own work over the view, choosing, and keeping the books of own work; and of the
    fixed piece of work."""

    overlay_s: float
    choose_s: float
    books_s: float
    yard_s: float

    @property
    def whole_s(self) -> float:
        return self.overlay_s + self.choose_s + self.books_s


def measure(size: int, decisions: int, seed: int) -> list[Taken]:
    chance = random.Random(seed)
    cluster, overlay = Cluster(size, chance), Overlay(NEAR)
    names = list(cluster.nodes)
    prompts = [bytes(TOKEN_BYTES * tokens) for tokens in (500, 4_000, 18_000, 30_000, 90_000)]
    in_flight: deque[AttemptId] = deque()
    for name in names:
        overlay.reported(name, 0.0)
    taken: list[Taken] = []
    due = 0.0
    for number in range(decisions):
        now = 10.0 + number / PER_S
        due += size / PER_S
        while due >= 1:
            due -= 1
            name = names[(number * 7919 + int(due)) % size]
            cluster.report(name)
            overlay.reported(name, now)
        fold = cluster.view()
        request = Request(
            id=RequestId(f"r{number}"), model="m", prompt=chance.choice(prompts), sampling=Sampling(max_tokens=1024)
        )
        holders = {name: Match(chance.choice(BOUNDARIES), 3840) for name in chance.sample(names, PREFIX_HOLDERS)}
        started = time.perf_counter()
        view = overlay.view(fold, now)
        laid = time.perf_counter()
        route = choose(request, holders, view, PARAMS)
        chosen = time.perf_counter()
        attempt = AttemptId(str(number))
        overlay.charge(
            attempt,
            route.prefill,
            route.decode,
            route.prefill_tokens,
            request.prompt_tokens + request.sampling.max_tokens,
            route.transfer_bytes or 0,
            now,
        )
        in_flight.append(attempt)
        if len(in_flight) > IN_FLIGHT:
            overlay.prefilled(in_flight[IN_FLIGHT // 2], now)
            overlay.discharge(in_flight.popleft(), now)
        booked = time.perf_counter()
        hashlib.sha256(YARD).digest()
        taken.append(Taken(laid - started, chosen - laid, booked - chosen, time.perf_counter() - booked))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    taken = measure(options.nodes, options.decisions, options.seed)[options.decisions // 10 :]
    result: dict[str, object] = {"nodes": options.nodes, "decisions": len(taken)}
    for part in ("whole", "choose", "overlay", "books", "yard"):
        cuts = statistics.quantiles((getattr(each, f"{part}_s") for each in taken), n=100)
        figures = {f"p{cut}_us": round(cuts[cut - 1] * 1e6, 1) for cut in (10, 50, 99)}
        yards = statistics.median(getattr(each, f"{part}_s") / each.yard_s for each in taken)
        result[part] = figures | {"yards": round(yards, 1)}
    print(json.dumps(result) if options.json else "\n".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
