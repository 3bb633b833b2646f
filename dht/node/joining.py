"""Bootstrap: a peer or client finds the swarm by its initial peers, or else by peers that it knew before."""

import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import trio

from molink.dht.errors import BootstrapUnreachable
from molink.dht.gossip import table
from molink.dht.gossip.sequences import DurableState
from molink.dht.gossip.table_reader import TableReader, nothing
from molink.dht.host import listener
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, Host, Listen, peer_id_in
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.door import ConnectionLimits
from molink.dht.membership.timing import DEGREE, DiscoveryTiming
from molink.dht.records.records import PeerFacts

logger = logging.getLogger(__name__)

SOURCES = 3
"""Peers whose tables are compared where there are as many."""
HELPERS = 2
"""Others that are asked for parts of a table which takes several: all are invited to the same few, and these would pay
for all."""
SLOW_S = 3.0
"""Who takes so long to give a first part has sent much of late, and lets others begin."""
HELPERS_BEGIN_S = 0.5
_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Fallback:
    """Fallback of the bootstrap, if none of the initial peers answers."""

    remembered: tuple[str, ...] = ()
    """Multiaddresses of members that were known before, to be asked in their place."""
    wait_s: float = 0.0
    """For how long to try again."""
    report: Callable[[str], None] = lambda _: None
    """Takes lines of progress, in the network's thread."""


NO_FALLBACK = Fallback()


AnswersOverRelays = Callable[[PeerFacts], Awaitable[bool]]
"""Whether a peer answers over the relays that it announces; asked in trio."""


async def nobody_relays(_: PeerFacts) -> bool:
    """Where nothing is known of relays."""
    return False


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Settings of a network. `listen` None: a client, which accepts nobody and announces nothing."""

    identity: Identity
    listen: Listen | None
    initial_peers: tuple[str, ...]
    swarm_key: SwarmKey | None
    timing: DiscoveryTiming
    durable: DurableState | None = None
    fallback: Fallback = NO_FALLBACK
    over_relays: AnswersOverRelays = nobody_relays
    connections: ConnectionLimits = listener.LIMITS
    """Limits of those who dial it."""
    table_callers: ConnectionLimits = table.LIMITS


class Joining:
    """Bootstrap of one peer or client."""

    def __init__(
        self,
        host: Host,
        timing: DiscoveryTiming,
        reader: TableReader,
        living: Callable[[], Sequence[PeerFacts]],
        link_to: Callable[[str], None],
    ) -> None:
        """`living` says who is known so far; `link_to` is told of each initial peer that has answered."""
        self._host = host
        self._timing = timing
        self._reader = reader
        self._living = living
        self._link_to = link_to

    async def join(self, initial_peers: Sequence[str], fallback: Fallback) -> None:
        """Copies the swarm's records from the first that answers, and what others know beyond it from up to two more.

        Raises:
            BootstrapUnreachable: there are initial peers and nobody has answered in time.
        """
        deadline = trio.current_time() + fallback.wait_s
        initial_peers = [address for address in initial_peers if peer_id_in(address) != self._host.peer_id]
        while initial_peers:
            failures = await self._try(initial_peers)
            if failures is None:
                return
            if fallback.remembered and await self._try(fallback.remembered) is None:
                logger.warning(
                    "none of the initial peers answers: joined through peers that were remembered from before"
                )
                return
            left_s = deadline - trio.current_time()
            if left_s <= 0:
                raise BootstrapUnreachable(failures)
            fallback.report(
                f"Waiting for the initial peers: none of them answers yet, {left_s:.0f} s are left"
            )
            await trio.sleep(min(_RETRY_S, left_s))

    async def _try(self, addresses: Sequence[str]) -> list[tuple[str, str]] | None:
        """None: somebody has answered; else why each did not."""
        outcomes: dict[str, str | None] = dict.fromkeys(addresses, "no answer in time")
        helpers: list[str] = []
        with trio.move_on_after(self._timing.bootstrap_timeout_s):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._try_one, address, outcomes, helpers, nursery)
        failures = [(address, reason) for address, reason in outcomes.items() if reason is not None]
        return failures if len(failures) == len(outcomes) else None

    async def _try_one(
        self, address: str, outcomes: dict[str, str | None], helpers: list[str], nursery: trio.Nursery
    ) -> None:
        slow_at = trio.current_time() + SLOW_S

        async def part_came() -> None:
            nonlocal slow_at
            if not helpers:
                helpers.extend(self._helpers(outcomes))
                for helper in helpers:
                    nursery.start_soon(self._failure_to_copy, helper)
            if helpers and trio.current_time() > slow_at:
                slow_at = math.inf
                await trio.sleep(HELPERS_BEGIN_S)

        outcomes[address] = await self._failure_to_copy(address, part_came)
        if outcomes[address] is not None:
            return
        answered = sum(reason is None for reason in outcomes.values())
        if answered <= DEGREE:
            self._link_to(peer_id_in(address))
        if answered >= min(SOURCES, len(outcomes)):
            nursery.cancel_scope.cancel()

    def _helpers(self, initial_peers: Iterable[str]) -> list[str]:
        """Chooses addresses of some that can be dialled and are no initial peers, of those that are known by now."""
        asked = {peer_id_in(address) for address in initial_peers}
        others = [facts for facts in self._living() if facts.addresses and facts.peer_id not in asked]
        return [facts.addresses[0] for facts in random.sample(others, min(HELPERS, len(others)))]

    async def _failure_to_copy(
        self, address: str, part_came: Callable[[], Awaitable[None]] = nothing
    ) -> str | None:
        """Copies what the peer at that address knows beyond what others give. None: it has answered."""
        try:
            peer_id = await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
            await self._reader.copy_from(peer_id, part_came)
        except (DialError, StreamEndedError) as error:
            return str(error)
        except (
            Exception
        ) as error:  # the boundary of an initial peer: whatever it does, another one may answer
            logger.debug("asking %s failed", address, exc_info=True)
            return f"it answered with something else than the protocol ({type(error).__name__})"
        return None
