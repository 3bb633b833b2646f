"""Reach of one serving peer: its own relay, its stays at others', the holes that it punches, and what it announces.

At start and each half hour, and when its outer address or its stays change, relays are asked whether they can dial it
(`reachability.py` decides). A peer that listens on this machine only has none of this, and one whose owner has said
where others dial it is not asked about.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import host_of
from molink.dht.records.records import PeerFacts, PeerView, RelayAt
from molink.peer.reach.moving import HolePuncher, PunchingHandler
from molink.peer.reach.reachability import (
    MOST_ASKED,
    Finding,
    Reachable,
    RelayAnswer,
    announced,
    candidates,
    judge,
    stays_for,
)
from molink.peer.reach.relay import Relay
from molink.peer.reach.relay_limits import offered_mbps, relay_limits
from molink.peer.reach.stays import Stays
from molink.peer.wire.link.certificate import certificate_hash
from molink.peer.wire.link.inbound import descriptor_limit
from molink.peer.wire.link.links import Links
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.punching import observe_port
from molink.peer.wire.reach.relay_client import RelayUser, open_session

LOOK_EVERY_S = 1800.0
LOOK_AGAIN_S = 30.0
"""While nobody can say, or no relay can be stayed at."""
CHANGED_S = 1.0
"""After a change a look waits so long, for more of them."""
FIRST_STAY_S = 4.0
"""What the first stay may take before the first announcement."""
_log = logging.getLogger(__name__)


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
    is_told: bool
    """Whether the owner has said where others dial the peer."""
    is_local: bool
    """Whether the peer listens on this machine only."""


class Reach:
    """Keeps a peer reachable between `__aenter__` and `__aexit__`; `keep` it so meanwhile."""

    def __init__(
        self,
        settings: ReachSettings,
        user: RelayUser,
        links: Links,
        handler: PunchingHandler,
        grpc_port: int,
        snapshot: Callable[[], tuple[PeerView, ...]],
        is_member: Callable[[str], bool],
        uplink_mbps: Callable[[], float | None],
    ) -> None:
        self._settings = settings
        self._user = user
        self._links = links
        self._handler = handler
        self._grpc_port = grpc_port
        self._snapshot = snapshot
        self._uplink_mbps = uplink_mbps
        self._changed = asyncio.Event()
        self.relay: Relay | None = None
        mbps = offered_mbps(settings.offer, None)
        if not settings.is_local and mbps is not None and settings.relay != "on":
            limits = replace(relay_limits(descriptor_limit()), mbps=mbps)
            self.relay = Relay(
                settings.host, settings.relay_port, user.identity, user.swarm_key, limits, is_member
            )
        inside = "::1" if ":" in settings.host else "127.0.0.1"
        own = settings.host if settings.host not in ("0.0.0.0", "::") else inside  # noqa: S104
        self.stays = Stays(user, (own, grpc_port), self._relay_of, self._changed.set)
        self.finding = Finding(Reachable.RELAYED if settings.relay == "on" else Reachable.UNKNOWN)
        self.hard: bool | None = None
        """Whether this machine's NAT gives each destination another port; None: nobody knows."""
        self._puncher = HolePuncher(links, user, self.stays, lambda: self.finding.near)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self.relay is not None:
                await stack.enter_async_context(self.relay)
            await stack.enter_async_context(self.stays)
            await stack.enter_async_context(self._puncher)
            self._handler.puncher = self._puncher
            self._links.is_relayed = self._puncher.is_relayed
            self._links.host_of = self._served_host
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handler.puncher = None
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
        return self.told(base)

    def told(self, base: PeerFacts) -> PeerFacts:
        """`base` as it is to be announced now."""
        offers = self.relay is not None and (
            self.finding.reachable is Reachable.DIALABLE or self._settings.is_told or not self.finding.near
        )
        port = self.relay.port if offers and self.relay is not None else None
        return announced(base, self.finding, self.stays.relays, port)

    async def keep(self, base: PeerFacts, announce: Callable[[PeerFacts], Awaitable[None]]) -> None:
        """Looks again from time to time, until cancelled; `announce` is called with facts that have changed."""
        if self._settings.is_local:
            await asyncio.Event().wait()
        said = self.told(base)
        while True:
            settled = self.finding.reachable is Reachable.DIALABLE or bool(self.stays.relays)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if settled else LOOK_AGAIN_S):
                    await self._changed.wait()
                    await asyncio.sleep(CHANGED_S)
            self._changed.clear()
            await self._look(base)
            facts = self.told(base)
            if facts != said:
                await announce(facts)
                said = facts

    def describe(self) -> dict[str, object]:
        """For `status`, JSON-ready."""
        return {
            "reachable": self.finding.reachable.value,
            "nat": {None: "unknown", True: "hard", False: "cone"}[self.hard],
            "relays": [relay.peer_id for relay in self.stays.relays],
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
            self._snapshot(), self._user.identity.peer_id, self._links.dialler.ranges, random.Random()
        )
        asks = settings.relay == "auto" and not settings.is_told
        hashed = certificate_hash(base.certificate)
        answers = await asyncio.gather(
            *(
                self._ask(relay, hashed if asks and at < MOST_ASKED else None)
                for at, relay in enumerate(relays)
            )
        )
        found = judge([answer for answer in answers if answer is not None])
        if asks and found.reachable is Reachable.UNKNOWN:
            found = replace(found, reachable=self.finding.reachable, host=self.finding.host)
        elif settings.relay == "on":
            found = replace(found, reachable=Reachable.RELAYED)
        self.finding = found
        relayed = found.reachable is Reachable.RELAYED
        wanted = stays_for(self.stays.relays, found.near)
        if (
            not relayed
        ):  # behind a router that passes ports on, a stay that breaks tells that its address has changed
            wanted = wanted[:1] if found.host not in ("", host_of("".join(base.grpc_addresses[:1]))) else ()
        self.stays.keep(wanted)
        await self._look_at_nat()
        expects = self.relay is not None and not relayed
        self._links.dialler.ladder.expect = self.relay.expect if expects and self.relay is not None else None

    async def _look_at_nat(self) -> None:
        """Finds out whether this machine's NAT gives each destination another port."""
        self.hard = None
        if self.finding.reachable is Reachable.RELAYED and len(self.finding.near) > 1:
            with suppress(RelayError, OSError):
                observed = await observe_port(self.finding.near, self._user)
                self.hard = observed.hard
                observed.close()

    def _offer(self) -> None:
        """Takes over what the line was measured to carry."""
        mbps = offered_mbps(self._settings.offer, self._uplink_mbps())
        if self.relay is not None and mbps is not None:
            self.relay.limits = replace(self.relay.limits, mbps=mbps)

    async def _ask(self, relay: RelayAt, hashed: bytes | None) -> RelayAnswer | None:
        """What a relay says; None: nothing. `hashed`: the certificate that it is to look for."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            session = await open_session(relay, self._user)
        except (RelayError, OSError) as error:
            _log.debug("the relay %s says nothing: %s", relay.peer_id, error)
            return None
        took_s, found = clock() - began_s, None
        try:
            if hashed is not None:
                found = await session.dialled_back(self._grpc_port, hashed)
        except RelayError as error:
            _log.debug("the relay %s does not dial back: %s", relay.peer_id, error)
        finally:
            session.close()
        return RelayAnswer(relay, took_s, session.observed, found)

    def _served_host(self, peer_id: str) -> str | None:
        return self.stays.host_of(peer_id) if self.stays.serves(peer_id) else None

    def _relay_of(self, peer_id: str) -> RelayAt | None:
        """Where a peer says that it relays, if it may be dialled there."""
        own = self._links.dialler.ranges
        known = candidates(
            (view for view in self._snapshot() if view.peer_id == peer_id), "", own, random.Random(0)
        )
        return known[0] if known else None


def describe_reach(facts: PeerFacts) -> str | None:
    """For the owner: how others reach a peer that nobody can dial; None: it can be dialled."""
    if facts.grpc_addresses:
        return None
    if not facts.relays:
        return "Nobody can dial this peer, and no relay takes it yet: it goes on asking"
    hosts = ", ".join(host_of(relay.address) for relay in facts.relays)
    return f"Nobody can dial this peer: others reach it over {hosts}"
