"""A browser for tests and benchmarks of the page: Debian's Chromium, driven by playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Those with which it runs without a screen, as any user, and asks nobody but the gateway."""
DEADLINE_MS = 120_000


class BrowserMissing(Exception):
    """There is no Chromium on this machine."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Raises BrowserMissing, which says what to install."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise BrowserMissing("the page is tested in Chromium, which is not here: apt-get install -y chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_at(browser: Browser, url: str, **context: Any) -> AsyncIterator[Page]:  # noqa: ANN401 - playwright's own
    """The page in a window of its own. Nothing may have gone wrong in it, and nothing been asked of anybody else."""
    wrong: list[str] = []
    asked: list[str] = []
    window = await browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **context})
    window.set_default_timeout(DEADLINE_MS)
    expect.set_options(timeout=DEADLINE_MS)
    page = await window.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    try:
        await page.goto(url)
        await page.wait_for_selector(".standing:has-text('peer')", state="attached")
        yield page
        assert [said for said in wrong if "Failed to load resource" not in said] == []
        assert [one for one in asked if not one.startswith((url, "blob:"))] == []
    finally:
        await window.close()
