"""The page in a real browser, over a scripted swarm: what people do with it, by mouse, keyboard and screen reader."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, expect
from support.page.browser import DEADLINE_MS, page_at
from support.page.page_swarm import PageSwarm, circuit_of, hops_of, page_snapshot, peer_of
from support.swarms.fake_swarm import gateway

from molink.client.errors import InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.full]
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
"""Would show itself by a dialog, by a picture that is not there, or by an element that the page does not have."""
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def swarm() -> PageSwarm:
    made = PageSwarm.of(8, pace_s=0.01)
    made.words = ("**Bold**", " and", " plain")
    return made


@pytest.fixture
def url(swarm: PageSwarm) -> Iterator[str]:
    with gateway(swarm) as found:
        yield found


@pytest.fixture
async def page(browser: Browser, url: str) -> AsyncIterator[Page]:
    async with page_at(browser, url) as found:
        yield found


async def say(page: Page, text: str) -> None:
    await page.fill("#message", text)
    await page.press("#message", "Enter")


async def answered(page: Page, count: int = 1) -> None:
    """Waits until so many answers are there, whole."""
    await expect(page.locator(".message.model .took", has_text="first after")).to_have_count(count)


async def test_an_answer_streams_in_is_drawn_as_markdown_and_says_what_it_took(page: Page) -> None:
    await say(page, "Speak!")
    await answered(page)
    await expect(page.locator(".prose strong")).to_have_text("Bold")
    await expect(page.locator(".message.own .plain")).to_have_text("Speak!")
    await expect(page.locator(".took")).to_contain_text("3 tokens")
    await expect(page.locator(".took")).to_contain_text("4 hops")
    await expect(page.locator(".hops > li")).to_have_count(4)


async def test_an_answer_that_is_there_before_what_draws_it_is_drawn_whole(page: Page) -> None:
    is_over = asyncio.Event()

    async def hold_back(route: Route) -> None:
        await is_over.wait()
        await route.continue_()

    await page.route("**/markdown-it.js", hold_back)
    await say(page, "Speak!")
    await answered(page)
    is_over.set()
    await expect(page.locator(".prose")).to_have_text("Bold and plain")


async def test_an_answer_is_stopped_and_its_circuit_given_back(page: Page, swarm: PageSwarm) -> None:
    swarm.hangs_at = 2
    await say(page, "Speak!")
    await expect(page.locator(".prose")).to_contain_text("and")
    await page.get_by_label("Stop the answer").click()
    await expect(page.locator(".took")).to_contain_text("stopped")
    assert swarm.ended.acquire(timeout=DEADLINE_MS / 1000)
    await expect(page.get_by_label("Send", exact=True)).to_be_visible()


async def test_it_answers_again_and_after_an_edit_with_what_was_edited(page: Page, swarm: PageSwarm) -> None:
    swarm.words = ("one",)
    await say(page, "Speak!")
    await expect(page.locator(".prose")).to_have_text("one")
    swarm.words = ("two",)
    await page.get_by_label("Answer again").click()
    await expect(page.locator(".prose")).to_have_text("two")
    await expect(page.locator(".message.own")).to_have_count(1)
    swarm.words = ("three",)
    await page.get_by_label("Edit your message").click()
    await page.fill("#editor", "Sing!")
    await page.press("#editor", "Enter")
    await expect(page.locator(".prose")).to_have_text("three")
    said = [[message["content"] for message in asked] for asked in swarm.prompts]  # type: ignore[attr-defined]
    assert said == [["Speak!"], ["Speak!"], ["Sing!"]]


async def test_settings_and_what_was_said_before_reach_the_gateway(page: Page, swarm: PageSwarm) -> None:
    await page.get_by_label("Settings", exact=True).click()
    await page.fill("#system", "Be brief.")
    await page.fill("#max_tokens", "33")
    await page.fill("#seed", "7")
    await page.get_by_label("Temperature").fill("0.3")
    await page.get_by_role("button", name="Done").click()
    await say(page, "One?")
    await answered(page)
    await say(page, "Two?")
    await answered(page, 2)
    asked, params = swarm.calls[-1]
    assert [(message["role"], message["content"]) for message in asked] == [  # type: ignore[attr-defined]
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "**Bold** and plain"),
        ("user", "Two?"),
    ]
    assert (params.max_new_tokens, params.seed, params.temperature) == (33, 7, 0.3)


async def test_a_model_without_a_chat_template_goes_on_with_the_text(
    page: Page, swarm: PageSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> AsyncIterator[None]:
        raise InvalidRequest(
            "the messages cannot be turned into tokens: this model does not know who speaks",
            "messages",
            "no_chat_template",
        )
        yield

    monkeypatch.setattr(PageSwarm, "stream_chat_events", refuses)
    await say(page, "ROMEO:")
    await answered(page)
    await expect(page.locator(".note")).to_contain_text("knows no chats")
    await expect(page.locator(".model .plain")).to_have_text("**Bold** and plain")
    await page.get_by_role("button", name="Go on").click()
    await answered(page, 2)
    assert swarm.prompts == ["ROMEO:", "ROMEO:**Bold** and plain"]


async def test_a_chat_template_that_refuses_is_an_error_and_chats_go_on(page: Page, swarm: PageSwarm) -> None:
    swarm.error = InvalidRequest("the model's chat template refuses these messages", "messages")
    await say(page, "Speak!")
    await expect(page.get_by_role("alert")).to_contain_text("refuses these messages")
    await expect(page.get_by_role("radio", name="Chat")).to_be_checked()
    await expect(page.locator(".note")).to_have_count(0)


async def test_what_had_no_answer_is_not_said_again_beside_the_next_message(
    page: Page, swarm: PageSwarm
) -> None:
    swarm.error = InvalidRequest("it failed")
    await say(page, "One?")
    await expect(page.get_by_role("alert")).to_have_text("it failed")
    swarm.error, swarm.hangs_at = None, 0
    await say(page, "Two?")
    await page.get_by_label("Stop the answer").click()
    await expect(page.locator(".took", has_text="stopped")).to_be_visible()
    swarm.hangs_at = None
    await say(page, "Three?")
    await answered(page)
    await say(page, "Four?")
    await answered(page, 2)
    said = [[message["content"] for message in asked] for asked in swarm.prompts]  # type: ignore[attr-defined]
    assert said[-2:] == [["Three?"], ["Three?", "**Bold** and plain", "Four?"]]


async def kept_titles(page: Page) -> list[str]:
    """Of the chats as they lie in the browser."""
    titles: list[str] = await page.evaluate(
        "() => JSON.parse(localStorage['molink.chats.1'] ?? '[]').map((chat) => chat.title)"
    )
    return titles


async def kept(page: Page, *titles: str) -> None:
    """Waits until chats of these titles lie in the browser."""
    await page.wait_for_function(
        "(titles) => JSON.stringify(JSON.parse(localStorage['molink.chats.1'] ?? '[]').map((chat) => chat.title))"
        " === JSON.stringify(titles)",
        arg=list(titles),
    )


async def second_tab(page: Page, *chats: str) -> Page:
    tab = await page.context.new_page()
    await tab.goto(page.url)
    await expect(tab.locator(".chat-name")).to_have_text(list(chats))
    return tab


async def test_a_second_tab_follows_the_first_and_ends_without_a_trace(page: Page) -> None:
    await say(page, "The first")
    await answered(page)
    await kept(page, "The first")
    tab = await second_tab(page, "The first")
    await page.get_by_role("navigation", name="Chats").get_by_role("button", name="New chat").click()
    await say(page, "The second")
    await answered(page)
    await page.get_by_label("Delete the chat The first").click()
    await kept(page, "The second")
    await expect(tab.locator(".chat-name")).to_have_text(["The second"])
    await expect(tab.locator(".message.own .plain")).to_have_text("The second")
    await tab.goto("about:blank")
    assert await kept_titles(page) == ["The second"]


async def test_a_tab_that_heard_nothing_of_others_keeps_what_they_kept(page: Page) -> None:
    await say(page, "The first")
    await answered(page)
    await kept(page, "The first")
    tab = await page.context.new_page()
    await tab.add_init_script("addEventListener('storage', (event) => event.stopImmediatePropagation())")
    await tab.goto(page.url)
    await expect(tab.locator(".chat-name")).to_have_text(["The first"])
    await page.get_by_role("navigation", name="Chats").get_by_role("button", name="New chat").click()
    await say(page, "The second")
    await answered(page)
    await page.get_by_label("Delete the chat The first").click()
    await kept(page, "The second")
    await tab.get_by_role("navigation", name="Chats").get_by_role("button", name="New chat").click()
    await say(tab, "The third")
    await answered(tab)
    await tab.goto("about:blank")
    assert sorted(await kept_titles(page)) == ["The second", "The third"]
    await expect(page.locator(".chat-name")).to_have_text(["The third", "The second"])


async def test_a_chat_that_another_tab_deletes_stays_until_its_answer_is_over(
    page: Page, swarm: PageSwarm
) -> None:
    await say(page, "The first")
    await answered(page)
    await kept(page, "The first")
    tab = await second_tab(page, "The first")
    await tab.evaluate("() => { globalThis.heard = 0; addEventListener('storage', () => { heard += 1; }); }")
    swarm.hangs_at = 2
    await say(tab, "And more")
    await expect(tab.locator(".prose").last).to_have_text("Bold and")
    await page.get_by_label("Delete the chat The first").click()
    await kept(page)
    await tab.wait_for_function("() => heard > 0")
    await expect(tab.locator(".message.own .plain")).to_have_text(["The first", "And more"])
    await tab.get_by_label("Stop the answer").click()
    await expect(tab.locator(".chat-name")).to_have_count(0)
    await tab.goto("about:blank")
    assert await kept_titles(page) == []


async def test_chats_are_still_there_after_the_page_is_loaded_again(page: Page) -> None:
    await say(page, "The first")
    await answered(page)
    await page.get_by_role("navigation", name="Chats").get_by_role("button", name="New chat").click()
    await say(page, "The second")
    await answered(page)
    await page.wait_for_function("() => JSON.parse(localStorage['molink.chats.1'] ?? '[]').length === 2")
    await page.reload()
    await page.get_by_role("button", name="The first", exact=True).click()
    await expect(page.locator(".message.own .plain")).to_have_text("The first")
    await page.get_by_label("Delete the chat The first").click()
    await expect(page.locator(".chat-name")).to_have_text(["The second"])


async def test_an_answer_is_copied(browser: Browser, url: str) -> None:
    async with page_at(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        await say(page, "Speak!")
        await answered(page)
        await page.get_by_label("Copy the answer").click()
        assert await page.evaluate("navigator.clipboard.readText()") == "**Bold** and plain"


async def test_a_failure_is_said_where_the_answer_would_be(page: Page, swarm: PageSwarm) -> None:
    swarm.error = InvalidRequest("the prompt is too long: shorten it", "prompt")
    await say(page, "Speak!")
    await expect(page.get_by_role("alert")).to_have_text("the prompt is too long: shorten it")


async def test_markup_in_prompts_answers_and_names_does_nothing(
    browser: Browser, swarm: PageSwarm, url: str
) -> None:
    name = f"x{MARKUP}"
    peers = [peer_of(at, name=name) for at in range(8)]
    swarm.state = page_snapshot(peers)
    swarm.state["reason"] = MARKUP
    swarm.words = (
        f"{MARKUP} ",
        "[a](javascript:alert(3)) ",
        f'![b](https://203.0.113.5/p.png "{MARKUP}") ',
        "<a href='data:text/html,hi'>c</a> ",
        "[d](https://example.org/) <math><mtext><style><img src=x onerror=alert(4)>",
    )
    async with page_at(browser, url) as page:
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        await say(page, MARKUP)
        await answered(page)
        await expect(page.locator(".happenings, .peers").first).to_contain_text("<script>")
        await expect(page.locator(".prose")).to_contain_text("<script>")
        assert (
            await page.evaluate("document.querySelectorAll('img, iframe, object, math, style').length") == 0
        )
        assert await page.evaluate("document.scripts.length") == 1
        links = await page.evaluate("[...document.querySelectorAll('.prose a')].map((one) => one.href)")
        assert all(link.startswith("https://") for link in links)
        assert "https://example.org/" in links
        assert dialogs == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
async def test_axe_finds_nothing_serious(
    browser: Browser, swarm: PageSwarm, url: str, theme: str, device: dict[str, Any]
) -> None:
    swarm.run_others(2)
    async with page_at(browser, url, color_scheme=theme, reduced_motion="reduce", **device) as page:
        await check_with_axe(page)
        await say(page, "Speak!")
        await answered(page)
        await check_with_axe(page)
        if device:
            await page.get_by_role("button", name="Swarm").click()
            await check_with_axe(page)
        swarm.state = page_snapshot(swarm.state["peers"][:3])
        await expect(page.locator(".coverage + .scale")).to_be_visible()
        await expect(page.locator("i.gap").first).to_be_attached()
        await check_with_axe(page)
        await page.get_by_label("Settings", exact=True).click()
        await check_with_axe(page)


async def check_with_axe(page: Page) -> None:
    found = (await Axe().run(page)).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    told = [{"id": one["id"], "nodes": [node["html"][:160] for node in one["nodes"][:3]]} for one in serious]
    assert told == [], json.dumps(told, indent=1)


async def test_a_screen_reader_is_told_the_beginning_and_the_whole_and_no_single_token(
    page: Page, swarm: PageSwarm
) -> None:
    await page.evaluate(
        """() => {
            globalThis.said = [];
            const place = document.querySelector('[role=status]');
            const watcher = new MutationObserver(() => said.push(place.textContent));
            watcher.observe(place, {childList: true, characterData: true, subtree: true});
        }"""
    )
    await say(page, "Speak!")
    await answered(page)
    await expect(page.locator("[role=status]")).to_have_text("The answer: **Bold** and plain")
    assert len(await page.evaluate("said")) <= 2
    assert (
        await page.evaluate("document.querySelectorAll('[aria-live], [role=log], [role=alert]').length") == 1
    )


async def test_everything_is_reached_by_keyboard(page: Page) -> None:
    await page.evaluate("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(40):
        await page.keyboard.press("Tab")
        reached.append(
            await page.evaluate(
                "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
            )
        )
    for name in ("Write a message", "Settings", "Messages", "Copy the command to join"):
        assert any(name in one for one in reached), (name, reached)


async def test_a_peer_is_chosen_by_keyboard_and_described_below_the_picture(page: Page) -> None:
    peer = page.get_by_role("button", name="birch-1")
    await peer.focus()
    await page.keyboard.press("Enter")
    await expect(peer).to_have_attribute("aria-pressed", "true")
    await expect(page.locator(".caption")).to_contain_text("birch-1 ")
    await expect(page.locator(".caption")).to_contain_text("layers 8–15")


async def test_a_key_is_asked_for_only_where_the_gateway_wants_one(browser: Browser, url: str) -> None:
    async def wants_key(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer sesame":
            await route.continue_()
        else:
            error = {"error": {"message": "A key is needed.", "type": "invalid_request_error"}}
            await route.fulfill(status=401, json=error)

    async with page_at(browser, url) as page:
        await page.get_by_label("Settings", exact=True).click()
        await expect(page.get_by_label("API key")).to_have_count(0)
        await page.get_by_role("button", name="Done").click()
        await page.route("**/v1/**", wants_key)
        await say(page, "Speak!")
        await expect(page.get_by_role("alert")).to_have_text("A key is needed.")
        await page.get_by_label("API key").fill("sesame")
        await page.get_by_role("button", name="Done").click()
        await page.get_by_label("Answer again").click()
        await expect(page.locator(".prose")).to_have_text("Bold and plain")
        assert await page.evaluate("() => sessionStorage['molink.key']") == "sesame"
        assert "sesame" not in await page.evaluate("() => JSON.stringify(localStorage)")


async def test_where_motion_is_not_wanted_nothing_moves(browser: Browser, swarm: PageSwarm, url: str) -> None:
    swarm.run_others(2)
    async with page_at(browser, url, reduced_motion="reduce") as page:
        await page.wait_for_function("() => molinkPicture()?.frames > 0")
        await page.wait_for_function("() => molinkPicture().frame === 0")


async def test_peers_that_state_regions_stand_on_a_map_and_elsewhere_if_asked(
    browser: Browser, swarm: PageSwarm, url: str
) -> None:
    regions = ("DE", "us-east-1", "JP", "br", "Sao Paulo", "sg", "za", "in")
    swarm.state = page_snapshot([peer_of(at, region=region) for at, region in enumerate(regions)])
    async with page_at(browser, url) as page:
        await expect(page.get_by_role("radio", name="Map")).to_be_checked()
        await expect(page.locator(".caption")).to_contain_text("In the regions that their owners state.")
        await page.wait_for_function("() => molinkPicture().land?.length > 100")
        west, east = await page.evaluate(
            "() => ['...01', '...02'].map((id) => "
            "[...molinkPicture().placed.at].find(([peer]) => peer.endsWith(id.slice(3)))[1].x)"
        )
        assert west < east
        await page.get_by_role("radio", name="Distance").check()
        await expect(page.locator(".caption")).to_contain_text("As far apart as their round trips")


async def test_circuits_and_layers_of_all_models_are_told_with_their_names(
    page: Page, swarm: PageSwarm
) -> None:
    other = [peer_of(20 + at, 8) | {"model": "other/model", "spans": [[0, 8]]} for at in range(2)]
    state = page_snapshot(swarm.state["peers"])
    models = [*state["models"], {"model": "other/model", "model_hash": "ef" * 32, "layers": 8, "peers": 2}]
    hops = [{**hops_of(swarm.state["peers"])[0], "peer_id": other[0]["peer_id"], "start": 0, "stop": 8}]
    swarm.state = state | {"models": models, "peers": [*state["peers"], *other]}
    swarm.run_others(2)
    swarm.running = [*swarm.running, circuit_of(hops, 9, model="other/model")]
    own = swarm.model.name
    await expect(page.locator(".standing")).to_have_text(
        f"10 peers · 2 circuits of {own}, 1 circuit of other/model"
    )
    await expect(page.locator("#coverage-title + p")).to_have_text("All 32 layers are held")
    await expect(page.locator(".coverage")).to_have_count(2)
    await expect(page.locator(".scale").last).to_contain_text("other/model")
    await expect(page.locator(".field-of-peers")).to_have_attribute(
        "aria-label", re.compile("3 circuits in use: .*of other/model, ")
    )


async def test_a_gap_opens_where_peers_leave_and_closes_when_they_come(page: Page, swarm: PageSwarm) -> None:
    whole = swarm.state
    await expect(page.locator("#coverage-title + p")).to_have_text("All 32 layers are held")
    swarm.state = page_snapshot([peer for peer in whole["peers"] if peer["spans"][0][0] != 8])
    await expect(page.locator("#coverage-title + p")).to_have_text("Nobody holds layers 8–15")
    await expect(page.locator("i.gap")).to_have_count(8)
    await expect(page.locator(".happenings .left")).to_have_count(2)
    swarm.state = whole
    await expect(page.locator("#coverage-title + p")).to_have_text("All 32 layers are held")
    await expect(page.locator(".happenings .joined")).to_have_count(2)
