"""Models that a client is told of: of several of one name the one first that it would open itself."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from support.swarms.swarm_of_fakes import FakePeer

from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.connection import SwarmConnection
from molink.dht.records.records import PeerView
from molink.shards.spec import Span

WHOLE = Span(0, 6)


def view(host: str, model_hash: str, layers: Span = WHOLE) -> PeerView:
    made = FakePeer(layers).view
    model = replace(made.facts.model, name="poet", model_hash=model_hash * 32, layers=6)
    return replace(made, facts=replace(made.facts, grpc_addresses=(f"{host}:4002",), model=model))


class Watching(AsyncSwarm):
    """A client that sees these peers, of which its user named one."""

    def __init__(self, views: tuple[PeerView, ...], named: PeerView | None) -> None:
        super().__init__()
        self.views = views
        self.named = frozenset(() if named is None else (named.peer_id,))

    @property
    def connection(self) -> SwarmConnection:
        seen = SimpleNamespace(snapshot=lambda: self.views, initial_peer_ids=self.named)
        return cast("SwarmConnection", seen)


def models_of(*views: PeerView, named: PeerView | None = None) -> list[str]:
    return [one.model_hash[:2] for one in asyncio.run(Watching(views, named).models())]


def test_a_strangers_model_takes_no_name_that_is_served_in_more_networks() -> None:
    stranger = view("192.0.2.1", "01")
    assert models_of(stranger, view("198.51.100.1", "9f"), view("203.0.113.1", "9f")) == ["9f", "01"]


def test_a_model_that_is_served_whole_goes_before_one_of_its_name_that_is_not() -> None:
    assert models_of(view("192.0.2.1", "01", Span(0, 3)), view("198.51.100.1", "9f")) == ["9f", "01"]


def test_what_the_initial_peers_serve_goes_before_others_of_its_name() -> None:
    own = view("127.0.0.1", "9f")
    assert models_of(view("192.0.2.1", "01"), view("198.51.100.1", "01"), own, named=own) == ["9f", "01"]
