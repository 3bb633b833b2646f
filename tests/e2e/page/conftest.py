"""What the tests of the page share: one browser."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser
from support.page.browser import BrowserMissing, chromium


@pytest.fixture(scope="session")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    try:
        async with chromium() as found:
            yield found
    except BrowserMissing as missing:
        pytest.fail(str(missing))
