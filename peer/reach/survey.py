"""Survey of how a machine is reached and how it reaches others, for `molink-peer doctor`: each way is tried once.

Everything is asked and dialled under identities that are thrown away, so that a survey beside a running peer takes no
link of that peer's and nobody mistakes one for it.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from molink.dht.errors import PortInUse
from molink.dht.identity.dialable import Ranges
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PeerFacts, PeerView, RelayAt
from molink.peer.reach.asking import Doorstep, ask_relay, is_hard_nat
from molink.peer.reach.moving import HolePuncher, PunchingHandler
from molink.peer.reach.reachability import MOST_ASKED, Finding, Reachable, RelayAnswer, candidates, judge
from molink.peer.reach.relay import Relay
from molink.peer.reach.stays import Stays
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Credentials, certificate_hash, new_certificate
from molink.peer.wire.link.dialled_connection import way_of
from molink.peer.wire.link.ladder import NEXT_RELAY_S
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.peer.wire.reach.relay_client import RelayUser, endpoint, host_and_port_of

TRIAL_TIMEOUT_S = 6.0
MEASURE_TIMEOUT_S = 2.0
PUNCHED_WITHIN_S = 5.0
LOOK_EVERY_S = 0.05
MOST_TRIED = 3
"""Peers that are tried for one way: one that is not there says nothing of this machine."""
DIRECT, REVERSED, RELAYED, PUNCHED = "direct", "reversed", "relayed", "punched"


@dataclass(frozen=True, slots=True)
class SurveyedRelay:
    """A relay, as this machine finds it."""

    relay: RelayAt
    round_trip_s: float | None
    """To connect; None: nobody answers there."""
    answer: RelayAnswer | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A link over one way."""

    way: str
    to: str
    """Peer id, or a relay's address; empty: there was nobody to try it with."""
    took_s: float | None = None
    """Until it was usable; None: it was not."""
    rtt_ms: float | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a survey has found."""

    relays: tuple[SurveyedRelay, ...]
    hard: bool | None
    """Whether the NAT gives each destination another port; None: nobody knows."""
    trials: tuple[Trial, ...]


class _NothingServed:
    """A LinkHandler that serves nothing."""

    def on_frame(self, link: Link, frame: Frame) -> None:
        raise ProtocolError(f"{link.peer_id} sent a {type(frame.header).__name__} to one who only looks")

    async def on_request(self, _: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
        return pb.Response(refusal=pb.Refusal(code="request", detail="nothing is served here")), b""

    def on_closed(self, link: Link, reason: str) -> None:
        """Nothing waits for it."""


class Surveyor:
    """Surveys with a port of its own, between `__aenter__` and `__aexit__`."""

    def __init__(
        self, listen: tuple[str, int], swarm_key: SwarmKey | None, ranges: Ranges, relay_port: int = 0
    ) -> None:
        """`listen`: the port that relays are asked to dial, unless a peer that runs has one. `relay_port`: where this
        machine's own relay would listen; 0: any free port."""
        identity = Identity.generate()
        certificate = new_certificate(identity.peer_id)
        handler = _NothingServed()
        own_links = Links(identity, handler, swarm_key, is_client=False)
        self._certificate = certificate.der
        self._acceptor = Acceptor(
            *listen, Credentials(identity.peer_id, certificate, swarm_key), own_links, handler
        )
        self._own_links = own_links
        self._own = RelayUser(identity, swarm_key)
        self._asker = RelayUser(Identity.generate(), swarm_key)
        self._relay_at = listen[0], relay_port
        self._inside = "::1" if ":" in listen[0] else "127.0.0.1"
        self._ranges = ranges
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises PortInUse."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._own_links)
            await stack.enter_async_context(self._acceptor)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def doorstep(self) -> Doorstep:
        """Its own port."""
        return Doorstep(self._acceptor.port, certificate_hash(self._certificate))

    async def survey(self, views: Sequence[PeerView], own_peer_id: str, sought: Doorstep) -> Survey:
        """Asks relays about `sought`, and tries each way. `own_peer_id` is that of a peer that runs here, or empty."""
        others = [view for view in views if view.peer_id != own_peer_id]
        relays = candidates(others, own_peer_id, self._ranges, random.Random())
        surveyed = await asyncio.gather(
            *(self._look_at(relay, sought if at < MOST_ASKED else None) for at, relay in enumerate(relays))
        )
        answering = sorted(
            (one for one in surveyed if one.answer is not None), key=lambda one: one.round_trip_s or 0.0
        )
        near = tuple(one.relay for one in answering)
        hard = await is_hard_nat(near, self._asker)
        found = judge([one.answer for one in answering if one.answer is not None])
        trials = (
            await self._try_direct(others),
            await self._try_reversed(others, near, found, sought.port),
            await self._try_relayed(others, near),
            await self._try_punched(others, near),
        )
        return Survey(tuple(surveyed), hard, trials)

    async def _look_at(self, relay: RelayAt, sought: Doorstep | None) -> SurveyedRelay:
        return SurveyedRelay(
            relay, await _round_trip_s(relay.address), await ask_relay(relay, self._asker, sought)
        )

    # -- trials

    def _links(self, handler: PunchingHandler | _NothingServed) -> Links:
        user = self._asker
        return Links(user.identity, handler, user.swarm_key, is_client=True, own_ranges=self._ranges)

    async def _try_direct(self, others: Sequence[PeerView]) -> Trial:
        there = [view.facts for view in others if view.facts.grpc_addresses][:MOST_TRIED]
        async with self._links(_NothingServed()) as links:
            trial = Trial(DIRECT, "", why_not="no other peer of the swarm announces an address")
            for facts in there:
                trial = await _try(links, replace(facts, relays=()), DIRECT, facts.peer_id)
                if trial.took_s is not None:
                    break
            return trial

    async def _try_reversed(
        self, others: Sequence[PeerView], near: Sequence[RelayAt], found: Finding, port: int
    ) -> Trial:
        """This machine's other end, which stays at the nearest relay, is asked to come to a relay of this machine's
        own, where others see it: so peers that nobody can dial come. `port`: where relays find this machine, if they
        do."""
        if found.reachable is not Reachable.DIALABLE:
            why_not = (
                "nobody is known to dial this machine; where it is asked to come, it does so as over a relay"
            )
            return Trial(REVERSED, "", why_not=why_not)
        if await _round_trip_s(host_and_port_of(found.host, port)) is None:
            why_not = (
                "others can dial this machine and it cannot dial itself where they do, so only they could try"
            )
            return Trial(REVERSED, "", why_not=why_not)
        asker = self._asker
        try:
            async with Relay(*self._relay_at, asker.identity, asker.swarm_key) as own:
                to = RelayAt(asker.identity.peer_id, host_and_port_of(found.host, own.port))
                return await self._try_staying(others, near[0], REVERSED, to, own)
        except PortInUse as error:
            return Trial(REVERSED, "", why_not=str(error))

    async def _try_relayed(self, others: Sequence[PeerView], near: Sequence[RelayAt]) -> Trial:
        """This machine stays at the nearest relay, and is reached there."""
        if not near or not others:
            return Trial(RELAYED, "", why_not="no relay answers")
        return await self._try_staying(others, near[0], RELAYED, near[0])

    async def _try_staying(
        self, others: Sequence[PeerView], relay: RelayAt, way: str, to: RelayAt, own: Relay | None = None
    ) -> Trial:
        """A link to this machine's other end, which stays at a relay. `own`: the relay of this end, which it is asked
        to come to at `to`."""
        identity = self._own.identity
        facts = replace(  # as another peer's, but for who and where it is
            others[0].facts,
            peer_id=identity.peer_id,
            public_key=identity.public_key,
            certificate=self._certificate,
            grpc_addresses=(),
            relays=(relay,),
        )
        stayed = asyncio.Event()
        stays = Stays(self._own, (self._inside, self._acceptor.port), {to.peer_id: to}.get, stayed.set)
        async with stays, self._links(_NothingServed()) as links:
            links.dialler.ladder.expect = own.expect if own is not None else None
            stays.keep((relay,))
            try:
                async with asyncio.timeout(TRIAL_TIMEOUT_S):
                    await stayed.wait()
            except TimeoutError:
                return Trial(way, to.address, why_not="the relay does not let this machine stay")
            return await _try(links, facts, way, to.address)

    async def _try_punched(self, others: Sequence[PeerView], near: Sequence[RelayAt]) -> Trial:
        """A link to a peer behind a NAT, once it has moved to a hole."""
        hidden = [view.facts for view in others if view.facts.relays and not view.facts.grpc_addresses]
        if not hidden:
            return Trial(PUNCHED, "", why_not="no other peer of the swarm is behind a NAT")
        handler = PunchingHandler(_NothingServed())
        async with (
            self._links(handler) as links,
            Stays(self._asker, ("127.0.0.1", 0), lambda _: None) as stays,
            HolePuncher(links, self._asker, stays, lambda: tuple(near)) as puncher,
        ):
            handler.puncher = puncher
            trial = Trial(PUNCHED, "")
            for facts in hidden[:MOST_TRIED]:
                trial = await _try(links, facts, PUNCHED, facts.peer_id)
                if trial.took_s is not None:
                    break
            return trial


async def _try(links: Links, facts: PeerFacts, way: str, to: str) -> Trial:
    """A link to a peer, as soon as it goes that way."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    try:
        link = await links.to(facts, TRIAL_TIMEOUT_S)
    except LinkError as error:
        return Trial(way, to, why_not=error.reason)
    try:
        rtt_ms: float | None = None
        if way == PUNCHED:
            try:
                async with asyncio.timeout(PUNCHED_WITHIN_S):
                    while way_of(link.connection) != PUNCHED:  # noqa: ASYNC110 - the link tells nobody
                        await asyncio.sleep(LOOK_EVERY_S)
            except TimeoutError:
                return Trial(way, to, why_not=f"no hole opened within {PUNCHED_WITHIN_S:g} s")
        elif way == REVERSED and way_of(link.connection) != REVERSED:
            return Trial(
                way, to, why_not=f"nobody came there within {NEXT_RELAY_S:g} s, so a relay carried the link"
            )
        took_s = clock() - began_s
        with suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                rtt_ms = await link.measured()
        return Trial(way, to, took_s, rtt_ms)
    finally:
        link.close("enough seen")


async def _round_trip_s(address: str) -> float | None:
    """How long it takes to connect; None: nobody answers."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*endpoint(address))
    except (OSError, TimeoutError, ValueError):
        return None
    took_s = clock() - began_s
    writer.transport.abort()
    return took_s
