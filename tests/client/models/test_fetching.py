"""Files from peers of which some give nothing, drip, or give something else."""

import asyncio
import hashlib
import random
from dataclasses import replace

import pytest
from support.links.data_plane import asynchronous, soon
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.models import fetching
from molink.client.models.fetching import ArtifactRequest, NotFetched, fetch
from molink.client.models.model_choice import asked_in_order, candidates, in_order_of_names
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

CONTENT = bytes(range(256)) * 4
PART = 100


class Files:
    """Links to peers that hand a file out as `ways` says of each peer, by its place among them."""

    def __init__(self, *ways: str) -> None:
        self.views = [FakePeer(Span(0, 6)).view for _ in ways]
        self.ways = {view.peer_id: way for view, way in zip(self.views, ways, strict=True)}
        self.asked: list[str] = []

    async def to(self, facts: PeerFacts) -> "FileLink":
        way = self.ways[facts.peer_id]
        self.asked.append(way)
        if way == "unreachable":
            raise LinkError(facts.peer_id, "it cannot be reached")
        return FileLink(facts.peer_id, way)


class FileLink:
    def __init__(self, peer_id: str, way: str) -> None:
        self.peer_id = peer_id
        self.way = way

    async def request(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, bytes]:
        offset = request.get_file.offset
        if self.way == "silent":
            await asyncio.sleep(timeout_s)
            raise LinkError(self.peer_id, "no answer")
        if self.way == "drips":
            await asyncio.sleep(0.01)
            return pb.Response(content=pb.Content(total_bytes=10**6)), b"x"
        if self.way == "refuses":
            return pb.Response(refusal=pb.Refusal(detail="not here \x1b[2J at 203.0.113.7:4002")), b""
        if self.way == "too large":
            return pb.Response(content=pb.Content(total_bytes=2**40)), b"x"
        content = CONTENT if self.way == "honest" else bytes(len(CONTENT))
        part = b"" if self.way == "ends early" and offset else content[offset : offset + PART]
        return pb.Response(content=pb.Content(total_bytes=len(CONTENT))), part


def checked(data: bytes) -> bytes:
    if hashlib.sha256(data).digest() != hashlib.sha256(CONTENT).digest():
        raise ValueError("it does not have its hash")
    return data


WANTED = ArtifactRequest(lambda offset: pb.Request(get_file=pb.GetFile(offset=offset)), 2**20, checked)


@pytest.mark.parametrize(
    "other", ["unreachable", "silent", "drips", "refuses", "too large", "ends early", "forged"]
)
@asynchronous
async def test_who_does_not_hand_it_out_keeps_nobody_from_getting_it(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "HEDGE_S", 0.05)
    files = Files(other, other, other, "honest")
    content, view = await soon(fetch(files, files.views, WANTED))  # type: ignore[arg-type]
    assert content == CONTENT
    assert view.peer_id == files.views[3].peer_id


@asynchronous
async def test_who_drips_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "GRACE_S", 0.05)
    files = Files("drips")
    with pytest.raises(NotFetched, match="too slowly"):
        await soon(fetch(files, files.views, WANTED))  # type: ignore[arg-type]


@asynchronous
async def test_an_error_names_peers_and_neither_addresses_nor_control_characters() -> None:
    files = Files("refuses", "unreachable")
    with pytest.raises(NotFetched) as caught:
        await soon(fetch(files, files.views, WANTED))  # type: ignore[arg-type]
    said = str(caught.value)
    assert "an address" in said
    assert "203.0.113.7" not in said
    assert said.isprintable()


@asynchronous
async def test_who_brings_it_is_not_asked_beside_others() -> None:
    files = Files("honest", "honest")
    await soon(fetch(files, files.views, WANTED))  # type: ignore[arg-type]
    assert files.asked == ["honest"]


WHOLE = Span(0, 6)


def _view(address: str, name: str, span: Span = WHOLE, model_hash: str = "") -> PeerView:
    view = FakePeer(span).view
    model = replace(view.facts.model, name=name, model_hash=model_hash or f"{name:0>64}", layers=6)
    return replace(view, facts=replace(view.facts, grpc_addresses=(address,), model=model))


def test_networks_count_and_not_identities() -> None:
    honest = [_view("198.51.100.7:4002", "one"), _view("203.0.113.7:4002", "one")]
    crowd = [_view(f"192.0.2.{number}:4002", "two") for number in range(50)]
    assert [one.served.name for one in candidates([*crowd, *honest], ())] == ["one", "two"]


def test_a_model_of_which_layers_are_missing_comes_last() -> None:
    half = [_view(f"192.{number}.2.1:4002", "half", Span(0, 3)) for number in range(5)]
    whole = [_view("192.0.2.1:1", "whole", Span(0, 4)), _view("192.0.2.2:1", "whole", Span(3, 6))]
    assert [one.served.name for one in candidates([*half, *whole], ())] == ["whole", "half"]


def test_what_the_user_named_comes_first() -> None:
    crowd = [_view(f"192.{number}.2.1:4002", "crowd") for number in range(5)]
    named = _view("127.0.0.1:4002", "own")
    assert candidates([*crowd, named], {named.peer_id})[0].served.name == "own"


def test_of_models_of_one_name_the_likeliest_comes_first_whatever_else_strangers_announce() -> None:
    honest = [_view(f"198.{number}.100.7:4002", "poet", model_hash="9f" * 32) for number in (51, 52)]
    stranger = _view("192.0.2.1:4002", "poet", model_hash="01" * 32)
    misnamed = _view("192.0.2.2:4002", "bard", model_hash="9f" * 32)
    half = [_view(f"192.{at}.2.1:4002", "poet", Span(0, 3), model_hash="02" * 32) for at in range(5)]
    served = in_order_of_names([misnamed, *half, stranger, *honest], ())
    assert [(one.name, one.model_hash[:2]) for one in served] == [
        ("bard", "9f"),
        ("poet", "9f"),
        ("poet", "01"),
        ("poet", "02"),
    ]


def test_one_of_each_network_is_asked_before_a_second_one() -> None:
    crowd = [_view(f"192.0.2.{number}:4002", "one") for number in range(20)]
    others = [_view(f"198.51.{number}.7:4002", "one") for number in range(3)]
    order = asked_in_order([*crowd, *others], {crowd[4].peer_id}, random.Random(1))
    assert order[0].peer_id == crowd[4].peer_id
    assert {view.peer_id for view in others} <= {view.peer_id for view in order[:5]}
