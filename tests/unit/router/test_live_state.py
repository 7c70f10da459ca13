"""What the live page is told: everything that the router knows of a large cluster, in bounded size."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.cluster import NodeKind, Role
from prfaas.config import Config
from prfaas.errors import Overloaded
from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.membership.memory import MemoryStore
from prfaas.membership.plans import PlanRecord, plan_key
from prfaas.membership.records import Kind, NodeRecord, TelemetryRecord, encode, key_of
from prfaas.request import AttemptId, FinishReason, Path, Reason, Request, RequestId, Route, Sampling, TtftAccount
from prfaas.scheduling.admission import Admission, AdmissionParams, Ask
from prfaas.scheduling.allowance import UNLIMITED, Quota
from services.router.admin import AdminApi
from services.router.control import Control
from services.router.explain import remembering
from services.router.http.messages import HttpRequest
from services.router.live_page.tally import Tally
from services.router.openai.record import RequestLog

CLUSTER, KEY = Config().cluster.name, "sesame"
NAMES = ("alpha", "beta", "gamma")
INCARNATION = "00000000000000aa"


class Watched:
    """A router's control plane on a store, and its admin API; nothing else of it runs."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.control = Control(Config(), store, "m", "r1")
        self.admission = Admission(AdmissionParams(max_running=2))
        self.tally = Tally(lambda: 10.0)
        operator = self.control.operator(None)
        self.api = AdminApi(operator, KEY, self.control.live(operator, self.admission, self.tally, None))

    async def ask(self, **shown: Any) -> tuple[int, bytes]:
        headers = {"authorization": f"Bearer {KEY}"}
        body = json.dumps(shown).encode()
        http = HttpRequest(method="POST", path="/admin/v1/live", headers=headers, body=body, received_s=0.0)
        response = await self.api.handle(http)
        return response.status, response.body

    async def state(self, **shown: Any) -> dict[str, Any]:
        status, body = await self.ask(**shown)
        assert status == 200, body
        told: dict[str, Any] = json.loads(body)
        return told

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what the follower has read
                await asyncio.sleep(0.005)

    async def put(self, name: str, *, silent: bool = False, **changes: Any) -> None:
        """Register a node, and let it report unless it is silent."""
        load = {field: changes.pop(field) for field in tuple(changes) if field in TelemetryRecord.__struct_fields__}
        role = changes.pop("node_role", Role.DECODE)
        record = NodeRecord(
            **{
                "id": name,
                "region": "near",
                "kind": NodeKind.PD,
                "role": role,
                "incarnation": INCARNATION,
                "namespace": "n",
                "model": "m",
                "rpc_address": "127.0.0.1:1",
                "max_context_tokens": 1000,
                **changes,
            }
        )
        await self.store.put(key_of(CLUSTER, Kind.NODE, name), encode(record))
        if not silent:
            report = TelemetryRecord(incarnation=INCARNATION, role=role, seq=1, **load)
            await self.store.put(key_of(CLUSTER, Kind.TELEMETRY, name), encode(report))

    async def seen(self, nodes: int) -> None:
        await self.until(lambda: len(self.control.follower.view().nodes) == nodes)


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    one = Watched(MemoryStore(history_limit=20_000))
    following = asyncio.create_task(one.control.follower.run())
    try:
        yield one
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def states(told: dict[str, Any]) -> dict[str, str]:
    return {each["id"]: each["state"] for each in told["nodes"]["shown"]}


async def test_of_thousands_of_nodes_some_are_told_and_all_are_counted():
    """The answer stays small; the sums are over everything."""
    async with watched() as one:
        for number in range(2000):
            region, role = ("far", Role.PREFILL) if number % 4 == 0 else ("near", Role.DECODE)
            kind = NodeKind.PREFILL_WORKER if region == "far" else NodeKind.PD
            await one.put(
                f"n{number:04d}", region=region, kind=kind, node_role=role, queued_prefill_tokens=3, max_batch=8
            )
        await one.seen(2000)
        status, body = await one.ask(nodes=100)
        told = json.loads(body)
        assert status == 200 and len(body) < 60_000
        assert (told["nodes"]["total"], told["nodes"]["matching"], len(told["nodes"]["shown"])) == (2000, 2000, 100)
        far, near = told["regions"]
        assert (far["id"], far["roles"]["prefill"], near["roles"]["decode"]) == ("far", 500, 1500)
        assert (far["queued_prefill_tokens"], near["max_batch"]) == (1500, 12_000)
        assert len((await one.state(nodes=0))["nodes"]["shown"]) == 0


async def test_nodes_are_found_by_all_words_of_what_is_looked_for():
    async with watched() as one:
        await one.put(NAMES[0])
        await one.put(NAMES[1], region="far", node_role=Role.PREFILL)
        await one.put(NAMES[2], region="far")
        await one.seen(3)
        for words, found in (
            ("far", {"beta", "gamma"}),
            ("FAR prefill", {"beta"}),
            ("far alpha", set()),
            ("", {*NAMES}),
        ):
            told = await one.state(find=words)
            assert set(states(told)) == found
            assert told["nodes"]["matching"] == len(found) and told["nodes"]["total"] == 3


async def test_who_needs_a_look_comes_first():
    """Silent, converting, draining; then all others by name, or by how busy they are."""
    async with watched() as one:
        await one.put("a", decode_busy_ratio=0.2)
        await one.put("b", decode_busy_ratio=0.9)
        await one.put("x", draining=True)
        await one.put("y", phase="converting")
        await one.put("z", silent=True)
        await one.seen(5)
        told = await one.state()
        assert list(states(told).items()) == [
            ("z", "silent"),
            ("y", "converting"),
            ("x", "draining"),
            ("a", "serving"),
            ("b", "serving"),
        ]
        assert told["regions"][0]["states"] == {"silent": 1, "converting": 1, "draining": 1, "serving": 2}
        assert list(states(await one.state(busiest=True)))[:2] == ["b", "a"]
        assert list(states(await one.state(nodes=1))) == ["z"]


async def test_a_node_that_has_gone_is_told_of_until_it_is_back():
    async with watched() as one:
        await one.put("a")
        await one.put("b")
        await one.seen(2)
        assert states(await one.state()) == {"a": "serving", "b": "serving"}
        await one.store.delete(key_of(CLUSTER, Kind.NODE, "b"))
        await one.seen(1)
        for _ in range(3):
            told = await one.state()
            assert list(states(told).items()) == [("b", "gone"), ("a", "serving")]
            assert (told["nodes"]["total"], told["nodes"]["matching"], told["nodes"]["gone"]) == (1, 1, 1)
        await one.put("b")
        await one.seen(2)
        assert states(await one.state()) == {"a": "serving", "b": "serving"}


async def test_role_changes_that_are_under_way_are_told():
    """Those that the plan wants and those that a node carries out."""
    async with watched() as one:
        for name in ("a", "b", "c"):
            await one.put(name, epoch=3)
        await one.put("d", phase="draining", epoch=4)
        plan = PlanRecord(epoch=4, threshold_tokens=700, shares={"a": 1.0, "b": 0.0}, reason="for a test", made_by="r9")
        await one.store.put(plan_key(CLUSTER), encode(plan))
        await one.seen(4)
        await one.until(lambda: one.control.follower.direction.plan is not None)
        told = await one.state()
        assert told["flips"]["total"] == 2
        wanted, under_way = told["flips"]["shown"]
        assert (wanted["id"], wanted["prefill_share"], wanted["planned_share"]) == ("a", 0.0, 1.0)
        assert (wanted["epoch"], wanted["plan_epoch"]) == (3, 4)
        assert (under_way["id"], under_way["phase"]) == ("d", "draining")
        assert (told["plan"]["epoch"], told["plan"]["made_by"], told["plan"]["nodes"]) == (4, "r9", 2)
        assert "shares" not in told["plan"], "they are as many as the nodes"


async def test_the_threshold_is_told_with_its_bounds():
    async with watched() as one:
        told = (await one.state())["threshold"]
        routing = Config().routing
        assert told["threshold_tokens"] == told["effective_threshold_tokens"] == routing.threshold_tokens
        assert (told["t_min_tokens"], told["t_force_tokens"]) == (routing.t_min_tokens, routing.t_force_tokens)


async def test_tenants_are_told_by_what_they_hold():
    """Running and waiting, in sequences and tokens, and what is left of their rates."""
    async with watched() as one:
        limited = Quota(tokens_per_min=6000.0)
        for tenant, tokens, quota in (("big", 100, UNLIMITED), ("big", 200, UNLIMITED), ("small", 50, limited)):
            one.admission.arrive(Ask(tenant=tenant, quota=quota, tokens=tokens), time.monotonic())
        told = (await one.state())["admission"]
        assert (told["running"], told["max_running"], told["waiting"], told["waiting_tokens"]) == (2, 2, 1, 50)
        big, small = told["tenants"]["shown"]
        assert (big["tenant"], big["running"], big["running_tokens"], big["tokens_left"]) == ("big", 2, 300, None)
        assert (small["waiting"], small["waiting_tokens"], small["tokens_left"]) == (
            1,
            50,
            pytest.approx(6000 - 50, abs=49),
        )
        assert big["requests_per_min"] is None


def route(uncached_tokens: int) -> Route:
    return Route(
        prefill="p",
        decode="d",
        path=Path.REMOTE,
        reason=Reason.LONG_PROMPT,
        uncached_tokens=uncached_tokens,
        transfer_tokens=0,
        threshold_tokens=600,
    )


async def test_a_decision_is_told_from_its_begin_to_its_outcome():
    """The latest first; with the account of the time to its first token once that is out."""
    async with watched() as one:
        decisions = one.control.steering.decisions
        observe = remembering(decisions, one.tally.besides(lambda _: None))
        stories = []
        for number in (1, 2):
            request = Request(
                id=RequestId(f"{number:032x}"), model="m", prompt=bytes(4000), sampling=Sampling(max_tokens=4)
            )
            stories.append(Story(attempts=[Attempt(AttemptId("a"), route(900))]))
            decisions.begun(request, stories[-1])
        running = (await one.state(decisions=1))["decisions"]
        assert [(each["id"][-1], each["status"], each["account"]) for each in running] == [("2", None, None)]
        story = stories[1]
        story.attempts[0].ending, story.finish, story.output_tokens = Ending.DONE, FinishReason.LENGTH, 4
        story.prefill = PrefillReport(
            queue_s=0.0, compute_s=0.2, exposed_s=0.0, prefill_tokens=900, kv_bytes=9, cached_tokens=99
        )
        record = RequestLog(route="completions", request_id="mine", completion_id=RequestId(f"{2:032x}"), status=200)
        record.ttft_s, record.account = 0.5, TtftAccount({"queue": 0.0625, "prefill": 0.25}, 0.5)
        record.story, record.prompt_tokens, record.output_tokens = story, 1000, 4
        observe(record)
        told = await one.state()
        done = told["decisions"][0]
        assert (done["path"], done["reason"], done["uncached_tokens"], done["prompt_tokens"]) == (
            "remote",
            "long_prompt",
            900,
            1000,
        )
        assert (done["status"], done["finish"], done["output_tokens"], done["ttft_seconds"]) == (200, "length", 4, 0.5)
        assert (done["account"]["queue"], done["account"]["prefill"]) == (0.0625, 0.25)
        assert sum(done["account"].values()) == pytest.approx(0.5)
        requests = told["requests"]
        assert (requests["total"], requests["by_path"], requests["cached_tokens"]) == (1, {"remote": 1}, 99)
        assert (requests["ttft"]["count"], requests["ttft"]["p50_seconds"], requests["output_tokens"]) == (1, 0.5, 4)


async def test_what_fails_is_counted_by_its_kind():
    """Probes and look-ups are no requests."""
    async with watched() as one:
        observe = one.tally.besides(lambda _: None)
        for status, error in ((429, Overloaded("x")), (429, Overloaded("x")), (500, ValueError())):
            record = RequestLog(route="chat", status=status)
            record.failed(error)
            observe(record)
        observe(RequestLog(route="ready", status=503, error="NotReady"))
        requests = (await one.state())["requests"]
        kinds = [(each["status"], each["error"], each["count"]) for each in requests["failures"]]
        assert kinds == [(429, "Overloaded", 2), (500, "ValueError", 1)]
        assert (requests["total"], requests["failed"], requests["by_path"]) == (3, 3, {"none": 3})


async def test_who_leads_is_known_to_all():
    """Also to those that do not."""
    async with watched() as one:
        other = Control(Config(), one.store, "m", "r2")
        electing = []
        for control in (other, one.control):
            electing.append(asyncio.create_task(control.election.run()))
            await one.until(lambda control=control: control.election.leader is not None)
        router = (await one.state())["router"]
        assert (router["leader"], router["leads"], router["id"]) == ("r2", False, "r1")
        for task in electing:
            task.cancel()
        await asyncio.gather(*electing, return_exceptions=True)


@pytest.mark.parametrize(
    "shown",
    [
        {"nodes": 501},
        {"nodes": -1},
        {"nodes": "many"},
        {"decisions": 101},
        {"find": "x" * 101},
        {"node": 1},
        {"busiest": "maybe"},
    ],
)
async def test_what_cannot_be_told_is_refused(shown: dict[str, Any]):
    async with watched() as one:
        status, body = await one.ask(**shown)
        assert status == 400 and json.loads(body)["error"]["message"]
