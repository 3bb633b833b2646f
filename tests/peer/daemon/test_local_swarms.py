"""Swarms of the local network are suggested to an owner who named none, and joined only if the owner says so."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.links.data_plane import Recorder, soon

from molink.dht.identity.identity import Identity
from molink.dht.node.local_network import NearbyPeer
from molink.peer.daemon import local_swarms
from molink.peer.daemon.local_swarms import LocalPresence, ask_where_to_join, names_no_swarm
from molink.peer.daemon.settings import JoinSettings, load_settings
from molink.peer.wire.link.links import Links

OWN, OTHER = (Identity.generate().peer_id for _ in range(2))
ADDRESS = f"/ip4/192.168.1.7/tcp/4001/p2p/{OTHER}"
Settings = Callable[..., JoinSettings]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    def make(**given: object) -> JoinSettings:
        return load_settings({"state_dir": tmp_path, "local_network": "on", **given}, {})

    return make


def finds(patch: pytest.MonkeyPatch, *peers: NearbyPeer) -> None:
    async def find() -> tuple[NearbyPeer, ...]:
        return peers

    patch.setattr(local_swarms, "find_local_peers", find)


def answers(patch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return answer

    patch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    patch.setattr(typer, "confirm", confirm)
    return asked


def test_only_an_owner_who_named_no_swarm_is_asked(settings: Settings) -> None:
    assert names_no_swarm(settings())
    assert not names_no_swarm(settings(new_swarm=True))
    assert not names_no_swarm(settings(initial_peers=(ADDRESS,)))
    assert not names_no_swarm(settings(local_network="off"))


@pytest.mark.parametrize("joins", [True, False])
def test_what_the_owner_says_at_the_terminal_decides(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    finds(monkeypatch, NearbyPeer(OTHER, (ADDRESS,), private=False))
    asked = answers(monkeypatch, joins)
    said = ask_where_to_join(settings())
    assert asked == ["No swarm is configured; on the local network there is a peer at 192.168.1.7. Join?"]
    assert said == ({"initial_peers": (ADDRESS,)} if joins else {"new_swarm": True})


def test_nobody_is_asked_of_a_swarm_whose_key_the_peer_has_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch, NearbyPeer(OTHER, (ADDRESS,), private=True))
    asked = answers(monkeypatch, True)
    assert (ask_where_to_join(settings()), asked) == ({}, [])


def test_without_a_terminal_nothing_is_joined_and_a_founder_notes_what_it_could_have_joined(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch, NearbyPeer(OTHER, (ADDRESS,), private=False))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert ask_where_to_join(settings()) == {}

    async def scenario() -> str:
        said: asyncio.Queue[str] = asyncio.Queue()
        links = Links(Identity.generate(), Recorder(), None, is_client=False)
        async with LocalPresence(settings(), OWN, (4001, 4002), links, said.put_nowait):
            return await soon(said.get())

    assert asyncio.run(scenario()).endswith(f"is joined with --initial-peers {ADDRESS}")
