"""A peer that is started while its owner needs the machine fetches, measures and loads nothing until that is over."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest
from support.links.data_plane import asynchronous, soon, until

from molink.peer.daemon import peer as peer_module
from molink.peer.daemon.parts import PeerParts
from molink.peer.daemon.peer import Peer, PeerError
from molink.peer.daemon.settings import load_settings
from molink.peer.host_policy import rules, start_wait
from molink.peer.host_policy.rules import HostPolicy, Readings
from molink.peer.host_policy.start_wait import StartWait
from molink.peer.state_dir import StateDir


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PAUSE_AFTER_S", 0.0)
    monkeypatch.setattr(rules, "RESUME_AFTER_S", 0.0)
    monkeypatch.setattr(start_wait, "LOOK_EVERY_S", 0.001)


def unreadable() -> Readings:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("read", [lambda: Readings(0), unreadable], ids=["calm", "unreadable"])
@asynchronous
async def test_a_peer_begins_at_once_where_nothing_speaks_against_it(read: Callable[[], Readings]) -> None:
    said: list[str] = []
    await soon(StartWait(said.append).until_over(HostPolicy(), ("cpu",), read))
    assert said == []


@asynchronous
async def test_it_says_once_what_it_waits_for_and_begins_when_no_reason_is_left() -> None:
    said: list[str] = []
    machine = [Readings(0, on_battery=True)]
    wait = StartWait(said.append)
    waiting = asyncio.create_task(wait.until_over(HostPolicy(), ("cpu",), lambda: machine[0]))
    await until(lambda: wait.reason is not None)
    assert wait.reason == "on battery"
    machine[0] = Readings(0, on_battery=False)
    await soon(waiting)
    assert wait.reason is None
    assert said == ["Waits before it begins: on battery"]


def test_a_peer_opens_nothing_before_and_its_status_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opening:
        """Stands for Bootstrap, which fetches, measures and loads."""

        def __init__(self, *_: object) -> None:
            pass

        async def open(self, _: AsyncExitStack) -> PeerParts:
            raise PeerError("it has begun")

    monkeypatch.setattr(peer_module, "Bootstrap", Opening)
    monkeypatch.setattr(peer_module, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    (tmp_path / "config.toml").touch()
    given = {"model": "own/model", "new_swarm": True, "device": "cpu"}
    settings = load_settings(given, {"MOLINK_CONFIG": str(tmp_path / "config.toml")})
    machine = [Readings(0, on_battery=True)]

    @asynchronous
    async def scenario() -> None:
        peer = Peer(settings, cast("StateDir", None), lambda _: None, lambda: machine[0])
        life = asyncio.create_task(peer.run(lambda _: None))
        await until(lambda: life.done() or "paused" in peer.status())
        assert peer.status() == peer.own_status() == {"ready": False, "paused": "on battery"}
        machine[0] = Readings(0)
        with pytest.raises(PeerError, match="it has begun"):
            await soon(life)
        assert peer.status() == {"ready": False}

    scenario()
