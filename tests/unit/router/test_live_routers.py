"""How many routers share the tenants' limits."""

import asyncio

from prfaas.config import Config
from prfaas.membership.memory import MemoryStore
from services.router.control import Control


async def test_routers_count_each_other_and_forget_who_has_stopped():
    """Each counts itself, whether or not the store has heard of it."""
    store = MemoryStore()
    one, other = Control(Config(), store, "m", "one"), Control(Config(), store, "m", "other")
    assert one.live_routers() == other.live_routers() == 1
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = {control: [] for control in (one, other)}
        for control, tasks in running.items():
            for name, story in control.stories(None).items():
                if name in ("announcement", "cluster view"):
                    tasks.append(group.create_task(story))
                else:
                    story.close()
        while (one.live_routers(), other.live_routers()) != (2, 2):  # noqa: ASYNC110 - what both have read
            await asyncio.sleep(0.01)
        for task in running[other]:
            task.cancel()
        while one.live_routers() != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in running[one]:
            task.cancel()
