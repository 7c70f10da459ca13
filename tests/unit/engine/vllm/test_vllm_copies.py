"""The connector's copies: what is granted is copied, what is revoked is not touched, and what goes wrong with one
attempt is the end of that attempt alone."""

import asyncio

import pytest

pytest.importorskip("torch")

from prfaas.engine.vllm.books import Begin, Load, Orders, Save
from prfaas.engine.vllm.bridge import Begun, Grant, Loaded, News, Saved, Wrote
from prfaas.errors import PeerUnavailable
from prfaas.kvcache.layout import Window
from tests.unit.engine.vllm.conftest import ATTENTION, LIVENESS_S, until

LENGTH = 40
WINDOW = Window(0, LENGTH, 0, state=True)
SAVE = Save("a", ((4, 1, 3), (5,)), 0, LENGTH, last=True)
STEP = Orders(begins=[Begin("a", 0)], saves=[SAVE])
LOAD = Load("request", "a", ([0, 6, 2], [7]), 0, LENGTH)


async def saved(join) -> None:
    """One step that saves a whole prompt."""
    join.copies.begin(STEP)
    await asyncio.to_thread(join.copies.layer_done, ATTENTION, STEP)
    join.copies.end(STEP)


async def told(join, *kinds: type[News]) -> list[News]:
    """All the news, as soon as one of each of these kinds has come."""
    await until(lambda: {type(news) for news in join.news}.issuperset(kinds))
    return join.news


async def test_what_is_saved_is_loaded(join):
    """Rows and states, into other blocks; each layer is announced where it ends."""
    async with join() as each:
        await each.bridge.grant(Grant("a", out=WINDOW, ends=(16, LENGTH)))
        await saved(each)
        news = await told(each, Saved)
        assert [one for one in news if isinstance(one, Wrote)] == [
            Wrote("a", 0, 16),
            Wrote("a", 0, LENGTH),
            Wrote("a", 1, LENGTH),
        ]
        assert isinstance(news[0], Begun)
        await each.bridge.revoke("a")
        await each.bridge.grant(Grant("a", held=(WINDOW,), held_tokens=LENGTH))
        assert each.copies.load(Orders(loads=[LOAD])) == ({"request"}, set())
        assert (each.cache[[0, 6]] == each.cache[[4, 1]]).all() and (each.cache[2][:8] == each.cache[3][:8]).all()
        assert (each.states[7] == each.states[5]).all()


async def test_a_revoke_waits_for_the_copy_under_way_and_nothing_is_copied_after_it(join):
    async with join() as each:
        await each.bridge.grant(Grant("a", out=WINDOW, ends=(LENGTH,)))
        each.rows.may.clear()
        saving = asyncio.create_task(asyncio.to_thread(each.copies.layer_done, ATTENTION, STEP))
        assert await asyncio.to_thread(each.rows.reading.wait, LIVENESS_S)
        revoking = asyncio.create_task(each.bridge.revoke("a"))
        done, _ = await asyncio.wait({revoking}, timeout=0.2)
        assert not done
        each.rows.may.set()
        await revoking
        before = each.pool[:]
        await saving
        await saved(each)
        assert each.copies.load(Orders(loads=[LOAD])) == ({"request"}, {"request"})
        assert each.pool[:] == before
        assert not any(isinstance(one, Saved) for one in each.news)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load("request", "a", ([0, 6, 2], [7]), 0, LENGTH - 1), id="another length"),
        pytest.param(Load("request", "a", ([0, 6], [7]), 0, LENGTH), id="too few blocks"),
        pytest.param(Load("request", "a", ([0, 6, 2], []), 0, LENGTH), id="no block for the states"),
        pytest.param(Load("request", "a", ([0, 6, 99], [7]), 0, LENGTH), id="no such block"),
        pytest.param(Load("request", "a", ([0, 6, 2],), 0, LENGTH), id="no such group"),
    ],
)
async def test_a_load_that_does_not_fit_fails_alone(join, load):
    """The server computes that request, and loads the next one."""
    async with join() as each:
        for attempt in ("a", "b"):
            await each.bridge.grant(Grant(attempt, held=(WINDOW,), held_tokens=LENGTH))
        other = Load("other", "b", ([1, 3, 4], [5]), 0, LENGTH)
        received, failed = each.copies.load(Orders(loads=[load, other]))
        assert (received, failed) == ({"request", "other"}, {"request"})
        await told(each, Loaded)
        await each.bridge.revoke("b")
        assert [one for one in each.news if isinstance(one, Loaded)] == [Loaded("a", False), Loaded("b", True)]


@pytest.mark.parametrize("blocks", [((4, 1), (5,)), ((4, 1, 3), ()), ((4, 1, 99), (5,)), ()])
async def test_a_save_that_does_not_fit_ends_its_attempt_alone(join, blocks):
    """It is never said to be saved, and so fails; the one beside it is saved."""
    async with join() as each:
        await each.bridge.grant(Grant("a", out=WINDOW, ends=(LENGTH,)))
        await each.bridge.grant(Grant("b", out=Window(0, LENGTH, 1 << 15, state=True), ends=(LENGTH,)))
        orders = Orders(saves=[Save("a", blocks, 0, LENGTH, True), Save("b", ((2, 6, 7), (0,)), 0, LENGTH, True)])
        each.copies.layer_done(ATTENTION, orders)
        each.copies.end(orders)
        await told(each, Saved)
        assert [one.attempt for one in each.news if isinstance(one, Saved)] == ["b"]


async def test_nobody_waits_for_a_connector_that_is_gone(join):
    """Neither who waits when it goes nor who comes later."""
    async with join() as each:
        await each.bridge.grant(Grant("a", out=WINDOW, ends=(LENGTH,)))
        each.rows.may.clear()
        saving = asyncio.create_task(saved(each))
        assert await asyncio.to_thread(each.rows.reading.wait, LIVENESS_S)
        revoking = asyncio.create_task(each.bridge.revoke("a"))
        await asyncio.sleep(0)
        each.close()
        async with asyncio.timeout(LIVENESS_S):
            for waits in (each.running, revoking, each.bridge.revoke("b"), each.bridge.grant(Grant("b"))):
                with pytest.raises(PeerUnavailable):
                    await waits
        each.rows.may.set()
        await saving
