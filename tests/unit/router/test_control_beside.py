"""What runs beside the serving may fail without taking the requests with it."""

import asyncio

import pytest

from services.router import control


async def test_steering_that_fails_is_begun_anew(monkeypatch: pytest.MonkeyPatch):
    """Again and again, until it is cancelled; a cancellation is not a failure."""
    monkeypatch.setattr(control, "AGAIN_S", 0.0)
    begun, third = 0, asyncio.Event()

    async def story() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError("our bug")
        third.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(control.kept_up("fast loop", story))
    async with asyncio.timeout(10):
        await third.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == 3
