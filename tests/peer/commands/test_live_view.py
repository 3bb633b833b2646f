"""What a peer's owner sees of it on a terminal while it serves."""

import asyncio
import io
from collections.abc import Mapping

import pytest
from rich.console import Console
from support.deadline import DEADLINE_S

from molink.peer.commands.live_view import LiveView, PeerLook, rows
from molink.peer.device.temperature import processor_c

INVITATION = "molink-peer join --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW"
STATUS: dict[str, object] = {
    "name": "attic",
    "model": "test/model",
    "dtype": "float32",
    "spans": [[0, 4], [6, 8]],
    "sessions": 2,
    "draining": False,
    "paused": None,
    "computed_tokens": 1200,
    "memory": {"total_bytes": 2**30, "free_weight_bytes": 2**20, "free_kv_bytes": 0},
    "reach": {"reachable": "relayed", "nat": "cone", "relays": ["12D3KooWrelay001"], "ways": {"punched": 1}},
}


def shown(change: Mapping[str, object], before: PeerLook | None = None) -> dict[str, str]:
    return dict(rows(PeerLook({**STATUS, **change}, 10.0, 61.4), before, INVITATION))


def test_it_says_how_the_peer_is_reached_what_it_holds_and_does_and_how_others_join() -> None:
    said = shown({}, PeerLook({**STATUS, "computed_tokens": 1000}, 6.0))
    assert "relayed" in said["reached"]
    assert "relay001" in said["reached"]
    assert "1 punched" in said["reached"]
    assert said["layers"] == "0:4, 6:8"
    assert said["sessions"] == "2"
    assert said["tokens served"] == "1,200, 50.0 a second"
    assert said["memory"].startswith("1.1 GB, of which 1.0 MB are free")
    assert said["processors"] == "61 °C"
    assert said["invite others"] == INVITATION


def test_a_peer_that_pauses_or_leaves_says_so() -> None:
    assert shown({"paused": "on battery"})["sessions"] == "2, paused: on battery"
    assert shown({"draining": True})["sessions"] == "2, takes nothing new"


def test_what_is_not_known_is_not_shown() -> None:
    headings = [heading for heading, _ in rows(PeerLook({"ready": True}, 1.0), None, "")]
    assert "processors" not in headings
    assert "invite others" not in headings


def test_it_is_drawn_below_what_is_printed_and_goes_away() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    drawn_once = asyncio.Event()
    looks = 0

    def describe() -> Mapping[str, object]:
        nonlocal looks
        looks += 1
        if looks > 1:  # what was seen first has been drawn
            drawn_once.set()
        return {**STATUS, "name": "attic\x1b[31m [bold]"}

    async def look() -> None:
        view = LiveView(console, lambda: 50.0)
        view.begin(describe, INVITATION)
        async with asyncio.timeout(DEADLINE_S):
            await drawn_once.wait()
        view.end()
        view.end()

    asyncio.run(look())
    drawn = out.getvalue()
    assert "tokens served" in drawn
    assert "attic?[31m [bold]" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor is there again


@pytest.mark.parametrize(
    ("temperatures_c", "processors_c"),
    [
        ({"coretemp": 61.0, "acpitz": 90.0}, 61.0),
        ({"acpitz": 40.0}, 40.0),
        ({"coretemp": -273.2, "k10temp": 55.0}, 55.0),
        ({"nvme": 70.0}, None),
        ({}, None),
    ],
)
def test_the_processors_temperature_is_that_of_the_best_sensor(
    temperatures_c: dict[str, float], processors_c: float | None
) -> None:
    assert processor_c(temperatures_c) == processors_c
