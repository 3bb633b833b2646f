"""A peer that is ordered another model joins with that one, or with its own again, and stays away if it is to leave."""

import asyncio
import errno
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from molink.peer.daemon import peer as peer_module
from molink.peer.daemon.model_switch import ModelSwitch
from molink.peer.daemon.parts import PeerParts
from molink.peer.daemon.peer import Peer, PeerError
from molink.peer.daemon.settings import JoinSettings, SettingsError, load_settings
from molink.peer.host_policy.rules import Readings
from molink.peer.state_dir import StateDir
from molink.shards.errors import WeightsError
from molink.shards.spec import Span

UNSERVABLE = [
    SettingsError("8.0 GB of memory is too little for other/model: give at least 40000MB"),
    OSError(errno.ENOSPC, "No space left on device"),
    MemoryError(),
    WeightsError(Path("other/model"), "they are damaged"),
]


@pytest.fixture
def settings(tmp_path: Path) -> JoinSettings:
    (tmp_path / "config.toml").touch()
    given = {
        "model": "own/model",
        "model_name": "mine",
        "layers": "2:5",
        "memory": "2GB",
        "new_swarm": True,
    }
    return load_settings(given, {"MOLINK_CONFIG": str(tmp_path / "config.toml")})


def test_it_joins_with_the_model_and_all_else_as_its_owner_said(settings: JoinSettings) -> None:
    assert settings.layers == Span(2, 5)
    switch = ModelSwitch()
    switch.order("other/model")
    ordered = switch.next_settings(settings)
    assert ordered is not None
    assert (ordered.options.model, ordered.options.model_name, ordered.layers) == ("other/model", None, None)
    assert (ordered.memory_bytes, ordered.state_dir, ordered.initial_peers) == (
        settings.memory_bytes,
        settings.state_dir,
        settings.initial_peers,
    )
    assert switch.next_settings(ordered) is None


def test_it_goes_back_once_and_says_why_until_the_next_order(settings: JoinSettings) -> None:
    switch = ModelSwitch()
    switch.order("other/model")
    switch.next_settings(settings)
    assert switch.go_back("other/model", "no memory") is settings
    assert switch.reason == "other/model cannot be served: no memory"
    assert switch.go_back("own/model", "the disk is full") is None
    switch.order("third/model")
    assert switch.reason is None


def test_a_model_that_was_served_is_not_left_for_the_one_before(settings: JoinSettings) -> None:
    switch = ModelSwitch()
    switch.order("other/model")
    switch.next_settings(settings)
    switch.stand()
    assert switch.go_back("other/model", "a device was lost") is None


def test_a_peer_that_is_to_leave_does_not_come_back(settings: JoinSettings) -> None:
    switch = ModelSwitch()
    switch.order("other/model")
    switch.cancel()
    assert switch.next_settings(settings) is None


@pytest.mark.parametrize("reason", UNSERVABLE, ids=lambda one: type(one).__name__)
def test_a_peer_whose_ordered_model_cannot_be_served_joins_with_the_one_before(
    settings: JoinSettings, reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str | None] = []

    class Opening:
        """Stands for Bootstrap: the model that was ordered fails, and so does its own when that has been seen."""

        def __init__(self, given: JoinSettings, *_: object) -> None:
            self.model = given.options.model

        async def open(self, _: AsyncExitStack) -> PeerParts:
            joined.append(self.model)
            raise reason if self.model == "other/model" else PeerError("that was its own")

    switch = ModelSwitch()
    switch.order("other/model")
    ordered = switch.next_settings(settings)
    assert ordered is not None
    nothing = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    for name, value in {"Bootstrap": Opening, "ModelSwitch": lambda: switch, "gc": nothing}.items():
        monkeypatch.setattr(peer_module, name, value)
    monkeypatch.setattr(peer_module, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    peer = Peer(ordered, cast("StateDir", None), lambda _: None, lambda: Readings(0))
    with pytest.raises(PeerError, match="that was its own"):
        asyncio.run(peer.run(lambda _: None))
    assert joined == ["other/model", "own/model"]
    assert switch.reason is not None
    assert switch.reason.startswith("other/model cannot be served: ")


OVER = SimpleNamespace(serving=SimpleNamespace(loader=SimpleNamespace(loads=False)))
"""What is left of a life that is over."""


def test_a_peer_that_begins_with_another_model_has_no_sessions_to_wait_for(
    settings: JoinSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, served = ModelSwitch(), []

    async def live(peer: Peer, _: object) -> None:
        served.append(peer.serves)
        if len(served) == 1:
            peer._parts = cast("PeerParts", OVER)  # noqa: SLF001 - as a life leaves it
            served.append(peer.serves)
            switch.order("other/model")

    monkeypatch.setattr(peer_module, "ModelSwitch", lambda: switch)
    monkeypatch.setattr(peer_module, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    monkeypatch.setattr(Peer, "_live", live)
    asyncio.run(Peer(settings, cast("StateDir", None), lambda _: None).run(lambda _: None))
    assert served == [False, True, False]


def test_no_other_model_is_joined_with_while_a_thread_still_loads_layers_of_the_one_before(
    settings: JoinSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, lives = ModelSwitch(), []

    async def live(*_: object) -> None:
        lives.append(1)
        if len(lives) == 1:
            switch.order("other/model")

    monkeypatch.setattr(peer_module, "ModelSwitch", lambda: switch)
    monkeypatch.setattr(peer_module, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    monkeypatch.setattr(Peer, "_live", live)
    monkeypatch.setattr(Peer, "loads", True)
    with pytest.raises(PeerError, match="still being loaded: start the peer again"):
        asyncio.run(Peer(settings, cast("StateDir", None), lambda _: None).run(lambda _: None))
    assert len(lives) == 1
