"""The live page in a real browser, on a cluster at work."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect
from playwright.async_api import Route as PageRoute

from prfaas.cluster import NodeKind, Role
from prfaas.membership.records import Kind, NodeRecord, encode, key_of
from prfaas.stores import open_store
from services.http_client import ask
from services.local_cluster import LocalCluster, Plan, Wan, store_of
from tests.chromium import chromium
from tests.e2e.client import complete, eventually
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sesame & <key>"
#: Where the screenshots are kept.
PICTURES = Path(__file__).parents[2] / "build" / "live-page"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: Longest wait for anything on the page.
LIVENESS_MS = 30_000
#: Where on the page each section begins.
PLACES = "[...document.querySelectorAll('h2')].map(each => Math.round(each.getBoundingClientRect().top))"
MARKUP = "<img src=x onerror=\"window.taken='yes'\"><script>window.taken='yes'</script>"

expect.set_options(timeout=LIVENESS_MS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    browser: Browser, start_embedded: StartCluster, model_dir: Callable[[str], Path]
) -> AsyncIterator[LocalCluster]:
    plan = Plan(
        model_dir=model_dir("cost_model"),
        threshold_tokens=600,
        admin_key=KEY,
        rebalance=False,
        pools=1,
        wan=Wan(mbit=400, rtt_ms=10),
        extra={"decode-worker": ("--store-lease-ttl-s", "3")},
    )
    async with start_embedded(plan) as running:
        yield running


@dataclass(slots=True)
class Watched:
    """A page, and what the browser had to complain of and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def cell(self, table: str, row: str, column: str) -> Any:
        """The cell in the row of that name and below that header."""
        place = f"count(//table[@id='{table}']/thead/tr/th[.='{column}']/preceding-sibling::th)+1"
        return self.page.locator(f"xpath=//table[@id='{table}']/tbody/tr[th[.='{row}']]/*[position()={place}]")


@asynccontextmanager
async def opened(browser: Browser, url: str) -> AsyncIterator[Watched]:
    context = await browser.new_context()
    context.set_default_timeout(LIVENESS_MS)
    page = await context.new_page()
    watched = Watched(page)
    page.on("console", lambda message: watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("request", lambda request: watched.asked.append(request.url))
    try:
        await page.goto(url)
        yield watched
    finally:
        await context.close()


def address(cluster: LocalCluster) -> str:
    """With the key in it, as an operator may keep it."""
    return f"{cluster.admin['router']}/#key=sesame%20%26%20%3Ckey%3E"


async def told(cluster: LocalCluster) -> dict[str, Any]:
    status, answer = await asyncio.to_thread(ask, "GET", f"{cluster.admin['router']}/admin/v1/live", key=KEY)
    assert status == 200, answer
    state: dict[str, Any] = json.loads(answer)
    return state


async def state_is(watched: Watched, state: str) -> None:
    await expect(watched.page.locator("body")).to_have_attribute("data-state", state)


async def test_the_page_says_what_the_api_says(browser: Browser, cluster: LocalCluster):
    """Nodes, roles, t, links, shards and a request, with no error and no question to anybody else; the key is not left
    in the address."""
    async with opened(browser, address(cluster)) as watched:
        page = watched.page
        await state_is(watched, "live")
        assert page.url == f"{cluster.admin['router']}/"
        decided = (await complete(cluster, token_ids(3000, seed=1), 4)).receipt
        row = decided["request_id"][:8]
        await expect(watched.cell("decisions", row, "Outcome")).to_have_text("4 tokens")
        await expect(watched.cell("decisions", row, "Path")).to_have_text("remote")
        await expect(watched.cell("decisions", row, "Because")).to_have_text("long prompt")
        await expect(watched.cell("decisions", row, "of prompt")).to_have_text("3,000")
        account = watched.cell("decisions", row, "Account").locator(".account")
        assert "prefill " in str(await account.get_attribute("aria-label"))

        state = await told(cluster)
        for node in state["nodes"]["shown"]:
            for column, text in (("Region", node["region"]), ("Role", node["role"]), ("State", "serving")):
                await expect(watched.cell("nodes", node["id"], column)).to_have_text(text)
        assert {each["id"] for each in state["nodes"]["shown"]} == {"prefill-0", "decode-0", "decode-1"}
        await expect(page.locator("#nodes tbody tr")).to_have_count(3)
        for region in state["regions"]:
            shown = watched.cell("regions", region["id"], "Prefill")
            await expect(shown).to_have_text(str(region["roles"]["prefill"]))
        await expect(page.locator("#tile-t .value span")).to_have_text("600")
        await expect(page.locator("#f-router")).to_contain_text(state["router"]["id"])
        await expect(watched.cell("shards", "pool-a-0", "Copy")).to_have_text("current")
        [capacity] = [
            each["capacity_bytes_per_s"] for each in state["links"]["shown"] if each["source"] != each["target"]
        ]
        await expect(watched.cell("links", "a → b", "Capacity")).to_have_text(f"{capacity / 1e6:.1f} MB/s")
        assert watched.complaints == []
        assert {url.startswith((f"{cluster.admin['router']}/", "data:")) for url in watched.asked} == {True}


async def test_a_wrong_key_is_named_and_a_right_one_lets_in(browser: Browser, cluster: LocalCluster):
    """Without a key the page asks for one; it is kept for the tab, and can be forgotten."""
    async with opened(browser, f"{cluster.admin['router']}/") as watched:
        page, field = watched.page, watched.page.get_by_label("Admin key of this router")
        await expect(field).to_be_focused()
        await expect(page.locator("#content")).to_be_hidden()
        await field.fill("open")
        await field.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("The router does not accept this key.")
        await expect(page.locator("#content")).to_be_hidden()
        await field.fill(KEY)
        await field.press("Enter")
        await expect(page.locator("#content")).to_be_visible()
        await page.reload()
        await state_is(watched, "live")
        await page.get_by_role("button", name="Forget key").click()
        await expect(page.locator("#content")).to_be_hidden()
        await page.reload()
        await expect(field).to_be_focused()


async def test_nothing_is_cut_off_or_moves(browser: Browser, cluster: LocalCluster):
    """While it is told new things every second, in a wide and a narrow window, by day and by night. A picture is kept
    of each."""
    for seed in range(20, 26):
        await complete(cluster, token_ids(300 if seed % 2 else 2000, seed=seed), 8)
    async with opened(browser, address(cluster)) as watched:
        page = watched.page
        await expect(page.locator("#decisions tbody tr").nth(5)).to_be_visible()
        for width in (1280, 800):
            await page.set_viewport_size({"width": width, "height": 900})
            before, asked = await page.evaluate(PLACES), len(watched.asked)

            async def asked_again(asked: int = asked) -> bool:
                """the page has asked once more, and then again"""
                return len(watched.asked) > asked + 1

            await eventually(asked_again)
            assert await page.evaluate(PLACES) == before
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            for theme in THEMES:
                await page.emulate_media(color_scheme=theme)
                await page.screenshot(path=PICTURES / f"{theme}-{width}.png", full_page=True)
        assert watched.complaints == []


async def test_what_others_have_named_stays_text(browser: Browser, cluster: LocalCluster):
    """A node's name is whatever registers it."""
    store, key = open_store(store_of(cluster)), key_of(cluster.plan.cluster, Kind.NODE, MARKUP)
    record = NodeRecord(
        id=MARKUP,
        region=MARKUP,
        kind=NodeKind.PREFILL_WORKER,
        role=Role.PREFILL,
        incarnation="00000000000000aa",
        namespace=MARKUP,
        model="another",
        rpc_address="127.0.0.1:1",
        max_context_tokens=10,
    )
    await store.put(key, encode(record))
    try:
        async with opened(browser, address(cluster)) as watched:
            names = watched.page.locator("#nodes tbody th")
            await expect(names.first).to_have_text(MARKUP)
            await expect(watched.page.locator("#regions tbody th", has_text="<script>")).to_have_count(1)
            assert await watched.page.evaluate("window.taken") is None
            assert await watched.page.locator("main img, main script").count() == 0
            assert watched.complaints == []
            await watched.page.get_by_label("Find").fill("decode serving")
            await expect(names).to_have_text(["decode-0", "decode-1"])
    finally:
        await store.delete(key)
        await store.close()


async def test_a_late_router_and_a_silent_store_are_told(browser: Browser, cluster: LocalCluster):
    """What is shown is never taken for newer than it is."""

    async def swallow(route: PageRoute) -> None:
        """Never answered."""

    async def age(route: PageRoute) -> None:
        """As a router answers that has lost its store."""
        answer = await route.fetch()
        state = await answer.json()
        state["router"]["view_age_seconds"] = 42
        await route.fulfill(response=answer, json=state)

    async with opened(browser, address(cluster)) as watched:
        page = watched.page

        async def comes_to(state: str, says: str) -> None:
            """As time passes for the page, a quarter of a second at a time."""

            async def so() -> bool:
                """the page is in this state and says so"""
                await page.clock.run_for(250)
                shown = await page.evaluate("document.body.dataset.state"), await page.inner_text("#notice")
                return shown[0] == state and says in shown[1]

            await eventually(so)

        await page.clock.install()
        await page.reload()
        await state_is(watched, "live")
        await page.clock.pause_at(datetime.now() + timedelta(minutes=1))
        await page.route("**/live", swallow)
        await comes_to("stale", "The router is late")
        await comes_to("lost", "no answer within 5 s")
        await page.unroute("**/live")
        await page.route("**/live", age)
        await comes_to("live", "has not heard from the store for 42 s")
        await page.unroute("**/live")
        await comes_to("live", "As this router sees the cluster")


async def test_a_node_that_dies_is_seen_to(browser: Browser, cluster: LocalCluster):
    """It does not just vanish from the table."""
    async with opened(browser, address(cluster)) as watched:
        await expect(watched.cell("nodes", "decode-1", "State")).to_have_text("serving")
        cluster.processes["decode-1"].kill()
        await expect(watched.cell("nodes", "decode-1", "State")).to_contain_text("gone")
        await expect(watched.page.locator("#tile-nodes .value span")).to_have_text("2")
        await expect(watched.page.locator("#nodes tbody th").first).to_have_text("decode-1")
        assert watched.complaints == []


async def test_a_lost_connection_is_told_and_mends_itself(browser: Browser, cluster: LocalCluster):
    """What is shown stays, marked as old; the page goes on by itself when the router is back."""
    async with opened(browser, address(cluster)) as watched:
        page, notice = watched.page, watched.page.locator("#notice")
        await state_is(watched, "live")
        router = cluster.processes["router"]
        router.kill()
        await state_is(watched, "lost")
        await expect(page.get_by_role("status")).to_have_text("Connection lost")
        await expect(notice).to_contain_text("Connection to the router lost")
        await expect(notice).to_contain_text("old")
        await expect(page.locator("#nodes tbody th").first).to_be_visible()
        await page.screenshot(path=PICTURES / "lost.png")
        await cluster.start_again("router")
        await state_is(watched, "live")
        await expect(page.locator("#events")).to_contain_text("the router was started again")
        await expect(page.locator("#tile-nodes .value span")).to_have_text("2")
