"""A headless Chromium for tests of what a person sees: `make chromium` brings one. Where there is none, they skip."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
#: It looks for nothing on its own: what it asks for is what the page asks for.
QUIET = ("--disable-gpu", "--disable-quic", "--disable-component-update", "--disable-sync", "--no-first-run")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH: `make chromium` brings one")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET])
        try:
            yield browser
        finally:
            await browser.close()
