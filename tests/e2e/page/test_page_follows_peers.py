"""The page over real peers: what it draws is what they do, also when one is killed while its text streams."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect
from support.gateways.forked_gateway import ForkedLocalGateway
from support.page.browser import page_at
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED

from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.anyio, pytest.mark.real]
TOKENS = 500


@pytest.fixture(scope="module")
async def swarm(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    """Each half of the bundled model on two peers."""
    async with ForkedSwarm() as made:
        await made.join("front-one", "--model", BUNDLED, "--layers", "0:6", "--region", "DE")
        await asyncio.gather(
            *(
                made.join(name, "--model", BUNDLED, "--layers", layers)
                for name, layers in (("front-two", "0:6"), ("back-one", "6:12"), ("back-two", "6:12"))
            )
        )
        yield made


@pytest.fixture
async def page(browser: Browser, swarm: LocalSwarm, tmp_path: Path) -> AsyncIterator[Page]:
    async with (
        ForkedLocalGateway(swarm.addresses, tmp_path / "log", "--invite", swarm.addresses[0]) as gateway,
        page_at(browser, gateway.url) as found,
    ):
        await found.get_by_role("radio", name="Complete").check()
        await found.get_by_label("Settings", exact=True).click()
        await found.fill("#max_tokens", str(TOKENS))
        await found.get_by_label("Temperature").fill("0")
        await found.get_by_role("button", name="Done").click()
        await expect(found.locator(".peers > li")).to_have_count(len(swarm.addresses))
        yield found


async def own_circuit(page: Page) -> dict[str, Any] | None:
    """The circuit of the page's latest message as the picture has it."""
    found: dict[str, Any] | None = await page.evaluate(
        "() => [...molinkPicture().circuits.values()].filter((one) => one.own).at(-1)?.circuit ?? null"
    )
    return found


@pytest.mark.full
async def test_a_killed_peer_leaves_the_picture_and_the_text_goes_on(page: Page, swarm: LocalSwarm) -> None:
    await expect(page.locator("#coverage-title + p")).to_have_text("All 12 layers are held")
    await expect(page.locator(".command code")).to_contain_text(swarm.addresses[0])
    await page.fill("#message", "ROMEO:")
    await page.press("#message", "Enter")
    await page.wait_for_function(
        "() => (document.querySelector('.model .plain')?.textContent.length ?? 0) > 40"
    )
    await expect(page.locator(".hops > li")).to_have_count(2)
    circuit = await own_circuit(page)
    assert circuit is not None
    assert [(hop["start"], hop["stop"]) for hop in circuit["hops"]] == [(0, 6), (6, 12)]
    victim = next(peer for peer in swarm.peers if peer.peer_id == circuit["hops"][1]["peer_id"])
    before = await page.locator(".model .plain").text_content()

    await swarm.kill(victim)

    await expect(page.locator(".figures")).to_contain_text("Peers lost")
    await expect(page.locator(".took")).to_contain_text("first after")
    after = await page.locator(".model .plain").text_content()
    assert before is not None
    assert after is not None
    assert after.startswith(before)
    assert len(after) > len(before)
    await expect(page.locator(".hops")).not_to_contain_text(victim.name)
    await expect(page.locator(".happenings .left")).to_contain_text(victim.name)
    await page.wait_for_function(
        "(gone) => molinkPicture().state.peers.get(gone)?.left_out ?? !molinkPicture().shown.has(gone)",
        arg=victim.peer_id,
    )


async def test_every_hop_is_timed_and_what_peers_served_is_counted(page: Page) -> None:
    await page.fill("#message", "JULIET:")
    await page.press("#message", "Enter")
    await expect(page.locator(".took")).to_contain_text("2 hops")
    await expect(page.locator("#last-title + p")).to_contain_text("measured")
    circuit = await own_circuit(page)
    if circuit is not None:  # it is shown for a few seconds after its end
        assert all(hop["compute_ms"] > 0 for hop in circuit["hops"])
    await page.get_by_role("button", name="front-one").click()
    await expect(page.locator(".caption")).to_contain_text("front-one DE")
    await expect(page.get_by_role("radio", name="Map")).to_be_attached()
    await page.wait_for_function(  # it comes with the swarm's next state
        "() => [...document.querySelectorAll('.peer-tokens')].filter((one) => Number(one.textContent) > 0).length === 2"
    )
