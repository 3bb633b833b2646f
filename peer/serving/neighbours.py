"""Links to the neighbours of a circuit, as far as strangers may have this machine dial for them.

A client names its circuit's hops, and each hop signs its own addresses: what comes of a dial is nobody's business but
that hop's. So whatever fails, the client hears the same, after the same time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from molink.dht.identity.dialable import Ranges, host_of, may_dial
from molink.dht.records.records import PeerFacts
from molink.dht.refusals import RefusalLog
from molink.peer.serving.budgets import Budget, RequestRate, RequestRates
from molink.peer.serving.dials import DialBackoff
from molink.peer.serving.timeouts import TIMEOUTS, ServingTimeouts
from molink.peer.wire.link.handshake import Remote
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.shards.address_ranges import range_of

DIALS = RequestRates(RequestRate(0.5, 32.0), RequestRate(1.0, 64.0), RequestRate(4.0, 128.0))
"""For clients, to identities that the swarm does not know at the address that they give."""
LOOK_EVERY_S = 0.1
NewestFacts = Callable[[str], PeerFacts | None]
"""What the swarm knows of an identity; None: nothing."""
_log = logging.getLogger(__name__)


class NeighbourLinks:
    """Opens links to neighbours, and owns what is known of addresses that do not answer."""

    def __init__(
        self,
        links: Links,
        own_ranges: Ranges,
        newest_facts: NewestFacts,
        timeouts: ServingTimeouts = TIMEOUTS,
    ) -> None:
        self._links = links
        self._timeouts = timeouts
        self._own_ranges = own_ranges
        self._newest_facts = newest_facts
        self._backoff = DialBackoff()
        self._budget = Budget(DIALS)
        self._refusals = RefusalLog(_log)

    def find(self, peer_id: str) -> Link | None:
        """The open link to that peer, if there is one."""
        return self._links.find(peer_id)

    async def link(self, facts: PeerFacts, client: Remote) -> None:
        """Returns once there is a link to that hop, dialled if that may be, else awaited.

        Raises:
            LinkError: there is none in time; it says nothing of why.
        """
        if self._links.find(facts.peer_id) is not None:
            return
        can_be_dialled = facts.grpc_addresses or facts.relays
        wait_s = self._timeouts.unreached_s if can_be_dialled else self._timeouts.silent_s
        given_up_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(given_up_s):
                known = self._newest_facts(facts.peer_id)
                newest = facts if known is None or known.sequence < facts.sequence else known
                for address in newest.grpc_addresses:
                    if self._links.find(facts.peer_id) is not None:
                        return
                    if self._may_try(newest, address, client, known):
                        there = replace(newest, grpc_addresses=(address,), relays=())
                        await self._dial(there, (address,), given_up_s)
                if not newest.grpc_addresses and self._links.find(facts.peer_id) is None:
                    # whoever names a relay and does not stay there must not keep others from it
                    places = {
                        relay: place
                        for relay in newest.relays
                        if self._may_try(
                            newest,
                            relay.address,
                            client,
                            known,
                            place := f"{facts.peer_id} over {relay.address}",
                        )
                    }
                    if places:
                        there = replace(newest, relays=tuple(places))
                        await self._dial(there, tuple(places.values()), given_up_s)
                while self._links.find(facts.peer_id) is None:  # noqa: ASYNC110 - it comes from the other end, maybe
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise LinkError(facts.peer_id, "it could not be reached") from None

    def _may_try(
        self, facts: PeerFacts, address: str, client: Remote, known: PeerFacts | None, place: str = ""
    ) -> bool:
        """Whether an address of a hop is dialled for a client. `place`: whose failures count; else the address's."""
        now = asyncio.get_running_loop().time()
        if range_of(host_of(address)) is not None and not may_dial(address, self._own_ranges):
            self._refusals.refused("dials to networks that are not the swarm's", client.peer_id)
            return False
        if not self._backoff.may_dial(facts.peer_id, place or address, now):
            return False
        if known is not None and address in (
            *known.grpc_addresses,
            *(relay.address for relay in known.relays),
        ):
            return True
        if self._budget.spend(client.peer_id, client.network, now):
            self._refusals.refused("dials beyond the rate", client.peer_id)
            return False
        return True

    async def _dial(self, facts: PeerFacts, places: Sequence[str], given_up_s: float) -> None:
        """`places`: whose failures count."""
        loop = asyncio.get_running_loop()
        failed = False
        try:
            await self._links.to(facts, self._timeouts.unreached_s)
        except LinkError as error:
            _log.debug("%s at %s: %s", facts.peer_id, places, error.reason)
            failed = True
        except asyncio.CancelledError:
            failed = loop.time() >= given_up_s  # else the client has gone
            raise
        else:
            for place in places:
                self._backoff.answered(facts.peer_id, place)
        finally:
            for place in places if failed else ():
                self._backoff.failed(facts.peer_id, place, loop.time())
