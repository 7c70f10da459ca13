"""A child counts as dead when it is silent, and not when it was the node that did not listen."""

import asyncio
import time

import pytest

from prfaas.errors import PeerUnavailable
from prfaas.node.answers import Pulse

SILENCE_S = 0.2
LIVENESS_S = 10.0


async def test_a_child_that_falls_silent_is_given_up():
    """Not before its first word (it may load a model for minutes), and not while it speaks."""
    pulse = Pulse("engine of w")
    watching = asyncio.create_task(pulse.watch(SILENCE_S))
    await asyncio.sleep(2 * SILENCE_S)
    for _ in range(40):
        assert not watching.done()
        pulse.beat()
        await asyncio.sleep(SILENCE_S / 20)
    with pytest.raises(PeerUnavailable, match="engine of w is unavailable: not a word"):
        await asyncio.wait_for(watching, LIVENESS_S)


async def test_a_node_that_was_held_up_does_not_blame_its_child():
    """What the child said meanwhile has not been read yet when the clock says that it is late."""
    pulse = Pulse("pump of w")
    watching = asyncio.create_task(pulse.watch(SILENCE_S))
    pulse.beat()
    for _ in range(3):
        await asyncio.sleep(0)
        time.sleep(2 * SILENCE_S)  # noqa: ASYNC251 - the node stands still
        await asyncio.sleep(0)
        assert not watching.done()
        pulse.beat()
    watching.cancel()
