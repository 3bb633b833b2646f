"""Reach of one serving peer: its own relay, its stays at others', the holes that it punches, and what it announces.

At start and each half hour, and when its outer address or its stays change, relays are asked whether they can dial it
(`reachability.py` decides). A peer that listens on this machine only has none of this, and one whose owner has said
where others dial it is not asked about.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import host_of
from molink.dht.records.records import PeerFacts, PeerView, RelayAt
from molink.peer.reach.asking import Doorstep, ask_relay, is_hard_nat
from molink.peer.reach.moving import HolePuncher, PunchingHandler
from molink.peer.reach.reach_sentences import RelaysAsked, reach_sentence
from molink.peer.reach.reachability import (
    MOST_ASKED,
    Finding,
    Reachable,
    announced,
    candidates,
    contradicted,
    is_out_of_reach,
    judge,
    relay_at,
    relays_to_tell,
    stays_for,
)
from molink.peer.reach.relay import Relay
from molink.peer.reach.relay_limits import offered_mbps, relay_limits
from molink.peer.reach.stays import Stays
from molink.peer.wire.link.certificate import certificate_hash
from molink.peer.wire.link.dialled_connection import way_of
from molink.peer.wire.link.inbound import descriptor_limit
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.reach.relay_client import OPEN_TIMEOUT_S, RelayUser
from molink.shards.address_ranges import ALL_INTERFACES

LOOK_EVERY_S = 1800.0
LOOK_AGAIN_S = 30.0
"""While nobody can say, or no relay can be stayed at."""
CHANGED_S = 1.0
"""After a change a look waits so long, for more of them."""
HEARD_S = 5.0
"""A peer that was heard on a link so lately is there: an idle link has a sign of life each 4 s."""
FIRST_STAY_S = 4.0
"""What the first stay may take before the first announcement."""


@dataclass(frozen=True, slots=True)
class ReachSettings:
    """What the owner has said of how the peer is reached."""

    host: str
    """Where the peer listens."""
    relay_port: int
    """Of the peer's own relay; 0: any free one."""
    offer: str
    """auto, off, or megabits per second: what the peer's own relay gives others."""
    relay: str
    """auto; on: never dialled, only over relays; off: never over relays."""
    told: str
    """host:port where others dial the peer, as the owner has said; empty: he has not."""
    is_local: bool
    """Whether the peer listens on this machine only."""
    announced_relay_port: int | None = None
    """As which others dial the relay's port; None: as it is on this machine."""
    joined_at: tuple[str, ...] = ()
    """Multiaddresses of the peers at which the owner has had it join."""
    mapped: str = ""
    """host:port where the router says that it passes the data plane on: no more than a claim; empty: nowhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What is running around it by then."""

    links: Links
    handler: PunchingHandler
    grpc_port: int
    snapshot: Callable[[], tuple[PeerView, ...]]
    facts_of: Callable[[str], PeerFacts | None]
    """The newest facts of a living peer, without a snapshot of all."""
    is_member: Callable[[str], bool]
    uplink_mbps: Callable[[], float | None]


class Reach:
    """Keeps a peer reachable between `__aenter__` and `__aexit__`; `keep` it so meanwhile."""

    def __init__(self, settings: ReachSettings, user: RelayUser, around: Surroundings) -> None:
        self._settings = settings
        self._user = user
        self._around = around
        self._changed = asyncio.Event()
        self.relay: Relay | None = None
        mbps = offered_mbps(settings.offer, None)
        if not settings.is_local and mbps is not None and settings.relay != "on":
            limits = replace(relay_limits(descriptor_limit()), mbps=mbps)
            self.relay = Relay(
                settings.host, settings.relay_port, user.identity, user.swarm_key, limits, around.is_member
            )
        inside = "::1" if ":" in settings.host else "127.0.0.1"
        own = settings.host if settings.host not in ALL_INTERFACES else inside
        self.stays = Stays(user, (own, around.grpc_port), self._relay_of, self._changed.set)
        self.finding = Finding(Reachable.RELAYED if settings.relay == "on" else Reachable.UNKNOWN)
        self.hard: bool | None = None
        """Whether this machine's NAT gives each destination another port; None: nobody knows."""
        self._reached = asyncio.Event()
        self._said: PeerFacts | None = None
        """As last announced: stays may begin between the first announcement and `keep`."""
        self._puncher = HolePuncher(around.links, user, self.stays, lambda: self.finding.near)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self.relay is not None:
                await stack.enter_async_context(self.relay)
            await stack.enter_async_context(self.stays)
            await stack.enter_async_context(self._puncher)
            self._around.handler.puncher = self._puncher
            self._around.links.is_relayed = self._puncher.is_relayed
            self._around.links.host_of = self._served_host
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._around.handler.puncher = None
        await self._stack.aclose()

    async def settled(self, base: PeerFacts) -> PeerFacts:
        """The facts to announce at first: a peer that is relayed has a stay by then, if any relay takes it."""
        await self._look(base)
        if self.finding.reachable is Reachable.RELAYED and self.finding.near:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_STAY_S):
                    while not self.stays.relays:
                        self._changed.clear()
                        await self._changed.wait()
        self._said = self.told(base)
        return self._noted(self._said)

    async def reached(self) -> None:
        """Returns once others have been told a way to this peer."""
        await self._reached.wait()

    def sentence(self, facts: PeerFacts) -> str | None:
        """For the owner: how others reach a peer that nobody can dial; None: it can be dialled."""
        settings = self._settings
        asked = RelaysAsked(self.finding.offered, len(self.finding.near), OPEN_TIMEOUT_S)
        return reach_sentence(facts, settings.relay, settings.told, asked, mapped=settings.mapped)

    def _noted(self, facts: PeerFacts) -> PeerFacts:
        if facts.grpc_addresses or facts.relays:
            self._reached.set()
        return facts

    def told(self, base: PeerFacts) -> PeerFacts:
        """`base` as it is to be announced now."""
        offers = self.relay is not None and bool(
            self.finding.reachable is Reachable.DIALABLE or self._settings.told or not self.finding.near
        )
        port = None
        if offers and self.relay is not None:
            port = self._settings.announced_relay_port or self.relay.port
        relays = relays_to_tell(() if self._said is None else self._said.relays, self.stays.relays)
        return announced(base, self.finding, relays, port, hard=self.hard)

    async def keep(self, base: PeerFacts, announce: Callable[[PeerFacts], Awaitable[None]]) -> None:
        """Looks again from time to time, until cancelled; `announce` is called with facts that have changed."""
        if self._settings.is_local:
            await asyncio.Event().wait()
        self._said = self._said or self.told(base)
        while True:
            settled = self.finding.reachable is Reachable.DIALABLE or bool(self.stays.relays)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if settled else LOOK_AGAIN_S):
                    await self._changed.wait()
                    await asyncio.sleep(CHANGED_S)
            self._changed.clear()
            await self._look(base)
            facts = self.told(base)
            if facts != self._said:
                await announce(facts)
                self._said = self._noted(facts)

    async def answers(self, facts: PeerFacts) -> bool:
        """Whether a peer is there, by a link to it or over the relays that it announces."""
        link = self._around.links.find(facts.peer_id)
        if link is not None and link.unheard_s < HEARD_S:
            return True
        try:
            knock = await self._around.links.dialler.knock(replace(facts, grpc_addresses=()))
        except LinkError:
            return False
        await knock.connection.close()
        return True

    def describe(self) -> dict[str, object]:
        """For `status`, JSON-ready."""
        return {
            "reachable": self.finding.reachable.value,
            "nat": {None: "unknown", True: "hard", False: "cone"}[self.hard],
            "relays": [relay.peer_id for relay in self.stays.relays],
            "ways": dict(Counter(self._way_of(link) for link in self._around.links.all())),
            "relayed_pairs": self.relay.pairs if self.relay is not None else 0,
        }

    # -- looks

    async def _look(self, base: PeerFacts) -> None:
        """Asks relays, and stays or goes as they say."""
        settings = self._settings
        if settings.is_local:
            return
        self._offer()
        relays = candidates(
            self._around.snapshot(),
            self._user.identity.peer_id,
            self._around.links.dialler.ranges,
            random.Random(),
        )
        asks = settings.relay == "auto"
        outside = settings.told or settings.mapped
        port = int(outside.rpartition(":")[2]) if outside else self._around.grpc_port
        sought = Doorstep(port, certificate_hash(base.certificate))
        answers = await asyncio.gather(
            *(
                ask_relay(relay, self._user, sought if asks and at < MOST_ASKED else None)
                for at, relay in enumerate(relays)
            )
        )
        said = [answer for answer in answers if answer is not None]
        found = judge(said)
        if asks and settings.told:
            gone = contradicted(settings.told, said)
            found = replace(found, reachable=Reachable.RELAYED if gone else Reachable.UNKNOWN, host="")
        elif asks and found.reachable is Reachable.UNKNOWN:
            found = replace(found, reachable=self.finding.reachable, host=self.finding.host)
        elif settings.relay == "on":
            found = replace(found, reachable=Reachable.RELAYED)
        if asks and not outside and found.reachable is Reachable.UNKNOWN and self._is_out_of_reach(base):
            found = replace(found, reachable=Reachable.RELAYED)
        self.finding = found = replace(found, offered=len(relays))
        relayed = found.reachable is Reachable.RELAYED
        wanted = stays_for(self.stays.relays, found.near)
        if not relayed:
            # behind a router that passes ports on, a stay that breaks tells that its address has changed
            passed_on = bool(settings.mapped) or found.host != host_of("".join(base.grpc_addresses[:1]))
            wanted = wanted[:1] if found.host and passed_on else ()
        self.stays.keep(wanted)
        self.hard = await is_hard_nat(found.near, self._user) if relayed else None
        ladder = self._around.links.dialler.ladder
        ladder.call = None if self.relay is None else self.relay.call
        ladder.expect = None if self.relay is None or relayed else self.relay.expect

    def _is_out_of_reach(self, base: PeerFacts) -> bool:
        """Whether others dial none of this peer's addresses, although no relay could say so."""
        others = [
            view.facts for view in self._around.snapshot() if view.peer_id != self._user.identity.peer_id
        ]
        dialled = [address for facts in others for address in facts.grpc_addresses]
        return is_out_of_reach(base.grpc_addresses, (*dialled, *self._settings.joined_at))

    def _offer(self) -> None:
        """Takes over what the line was measured to carry."""
        mbps = offered_mbps(self._settings.offer, self._around.uplink_mbps())
        if self.relay is not None and mbps is not None:
            self.relay.limits = replace(self.relay.limits, mbps=mbps)

    def _way_of(self, link: Link) -> str:
        """How a link goes now, as far as this end knows."""
        return way_of(link.connection) or ("relayed" if self.stays.guests.serves(link.peer_id) else "direct")

    def _served_host(self, peer_id: str) -> str | None:
        return self.stays.guests.host_of(peer_id) if self.stays.guests.serves(peer_id) else None

    def _relay_of(self, peer_id: str) -> RelayAt | None:
        """Where a peer says that it relays, if it may be dialled there."""
        facts = self._around.facts_of(peer_id)
        return None if facts is None else relay_at(facts, self._around.links.dialler.ranges)
