"""Asking peers what a model is: its manifest, by the hash that they have signed."""

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import ANYWHERE, Ranges, host_of
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.door import network_of
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.safetensors_header import StoreError

ASKED_PEERS = 5
"""Of those that serve a model; if none of them hands out its manifest, nobody else is asked."""
REQUEST_TIMEOUT_S = 10.0


def likeliest_contents(views: Sequence[PeerView], name: str, named: Collection[str]) -> list[str]:
    """The content hashes that are served under a name, the likeliest first: of a peer that the owner named, in the most
    networks, by the most peers. Identities cost nothing, so they count last.

    `named` are the ids of the peers that the owner named.
    """
    by_content: dict[str, list[PeerView]] = {}
    for view in views:
        if view.facts.model.name == name:
            by_content.setdefault(view.facts.model.content_hash, []).append(view)

    def rank(content_hash: str) -> tuple[bool, int, int, str]:
        serving = by_content[content_hash]
        networks = {_network(view) for view in serving}
        return (
            not any(view.peer_id in named for view in serving),
            -len(networks),
            -len(serving),
            content_hash,
        )

    return sorted(by_content, key=rank)


class ManifestSource:
    """Links of its own to peers, between `__aenter__` and `__aexit__`: for a peer that does not serve yet."""

    def __init__(
        self, swarm_key: SwarmKey | None, http_proxy: str | None, own_ranges: Ranges = ANYWHERE
    ) -> None:
        self._links = Links(
            Identity.generate(),
            self,
            swarm_key,
            is_client=True,
            http_proxy=http_proxy,
            own_ranges=own_ranges,
        )

    async def __aenter__(self) -> Self:
        await self._links.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._links.__aexit__(kind, error, trace)

    async def ask(self, views: Sequence[PeerView], content_hash: str) -> Manifest | None:
        """The manifest with this hash, from one of the peers that serve it; None if none of them hands it out."""
        serving = [view for view in views if view.facts.model.content_hash == content_hash]
        for view in serving[:ASKED_PEERS]:
            asked = pb.Request(get_manifest=pb.GetManifest(model_hash=view.facts.model.model_hash))
            try:
                link = await self._links.to(view.facts)
                response, payload = await link.request(asked, REQUEST_TIMEOUT_S)
                if response.WhichOneof("body") != "content":
                    continue
                manifest = Manifest.from_bytes(bytes(payload))
            except (LinkError, StoreError):
                continue
            if manifest.content_hash == content_hash:
                return manifest
        return None

    def on_frame(self, link: Link, frame: Frame) -> None:
        raise ProtocolError(f"{link.peer_id} sent a {type(frame.header).__name__} to one who only asked")

    async def on_request(self, _: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
        return pb.Response(refusal=pb.Refusal(code="request", detail="nothing is served here yet")), b""

    def on_closed(self, link: Link, reason: str) -> None:
        """Nothing waits for what a link may have brought: a request that was under way has failed by itself."""


def _network(view: PeerView) -> str:
    return network_of(host_of(view.facts.grpc_addresses[0])) if view.facts.grpc_addresses else ""
