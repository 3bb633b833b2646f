"""How soon the page is there, and how smoothly it draws a large swarm, in Chromium without a GPU.

First paint is cold: each round is a window of its own that has kept nothing. Frames are counted by the browser while
text streams, circuits go round and peers change, as many times a second as the gateway tells of it. Everything, the
browser, the gateway and this program, shares the machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.async_api import Browser
from support.page.browser import chromium, page_at
from support.page.page_swarm import PageSwarm
from support.swarms.fake_swarm import gateway

_COUNT_FRAMES = """(ms) => new Promise((resolve) => {
  const gaps = [];
  const picture = molinkPicture();
  const [frames, drawnMs] = [picture.frames, picture.drawnMs];
  const began = performance.now();
  let before = began;
  const step = (now) => {
    gaps.push(now - before);
    before = now;
    if (now - began < ms) requestAnimationFrame(step);
    else resolve({gaps: gaps.slice(1), seconds: (now - began) / 1000,
      drawn: picture.frames - frames, drawnMs: picture.drawnMs - drawnMs});
  };
  requestAnimationFrame(step);
})"""


@dataclass(slots=True)
class BusySwarm(PageSwarm):
    """A swarm in which something changes whenever it is looked at."""

    looks: int = field(default=0)

    def circuits(self) -> list[dict[str, Any]]:
        self.looks += 1
        for at, circuit in enumerate(self.running):
            circuit["tokens"] += 1 + at % 3
        return PageSwarm.circuits(self)

    async def snapshot(self) -> dict[str, Any]:
        for peer in self.state["peers"][self.looks % 3 :: 3]:
            peer["tokens_served"] += 7
            peer["coordinate"]["position"][0] += 0.01
        return json.loads(json.dumps(self.state))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FirstPaint:
    """First paint of the page, in milliseconds from the start of navigation: medians and the longest."""

    rounds: int
    first_contentful_paint_ms: float
    longest_first_contentful_paint_ms: float
    drawn_ms: float
    """Chat and swarm are in the document."""
    longest_drawn_ms: float
    transferred_bytes: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of the whole page while everything changes."""

    peers: int
    circuits: int
    frames_per_s: float
    gap_p95_ms: float
    longest_gap_ms: float
    picture_frames_per_s: float
    picture_ms: float
    """That the picture's own code takes for a frame."""


async def first_paint(browser: Browser, url: str, rounds: int) -> FirstPaint:
    """Opens the page so often, each time for the first time."""
    paints, drawns, sizes = [], [], []
    for _ in range(rounds):
        async with page_at(browser, url) as page:
            entries = await page.evaluate("() => performance.getEntries().map((one) => one.toJSON())")
        paints += [one["startTime"] for one in entries if one["name"] == "first-contentful-paint"]
        drawns += [one["startTime"] for one in entries if one["name"] == "drawn"]
        sizes.append(sum(one.get("transferSize", 0) for one in entries))
    median = statistics.median
    return FirstPaint(rounds, median(paints), max(paints), median(drawns), max(drawns), max(sizes))


async def frames(browser: Browser, url: str, swarm: PageSwarm, seconds: float) -> Frames:
    """Counts frames while a message streams."""
    async with page_at(browser, url) as page:
        await page.fill("#message", "Speak!")
        await page.press("#message", "Enter")
        await page.wait_for_selector(".message.model .prose > *")
        counted = await page.evaluate(_COUNT_FRAMES, seconds * 1000)
    gaps, lasted_s = sorted(counted["gaps"]), counted["seconds"]
    return Frames(
        peers=len(swarm.state["peers"]),
        circuits=len(swarm.running),
        frames_per_s=len(gaps) / lasted_s,
        gap_p95_ms=gaps[int(0.95 * len(gaps))],
        longest_gap_ms=gaps[-1],
        picture_frames_per_s=counted["drawn"] / lasted_s,
        picture_ms=counted["drawnMs"] / max(1, counted["drawn"]),
    )


async def measure(peers: int, circuits: int, rounds: int, seconds: float) -> dict[str, Any]:
    swarm = BusySwarm.of(peers, pace_s=0.03)
    swarm.words = tuple(f" word{at}" + (".\n\n" if at % 40 == 39 else "") for at in range(5000))
    swarm.run_others(circuits)
    async with chromium() as browser:
        with gateway(swarm) as url:
            await first_paint(browser, url, 1)  # the browser's own start
            painted = await first_paint(browser, url, rounds)
            drawn = await frames(browser, url, swarm, seconds)
    return {"first_paint": asdict(painted), "frames": asdict(drawn), "load_average": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--circuits", type=int, default=8, help="in use by others, beside the page's own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(measure(given.peers, given.circuits, given.rounds, given.seconds))
    if given.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        if not isinstance(figures, dict):
            print(f"{name}: {figures:.1f}")
            continue
        print(name)
        for figure, value in figures.items():
            print(f"  {figure:36} {value:,.1f}")


if __name__ == "__main__":
    main()
