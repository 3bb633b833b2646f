"""Bootstrap: a peer or client finds the swarm by its initial peers, or else by peers that it knew before."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from molink.dht.errors import BootstrapUnreachable
from molink.dht.gossip.sequences import DurableState
from molink.dht.gossip.table_reader import TableReader
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, Host, Listen, peer_id_in
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.timing import DEGREE, DiscoveryTiming
from molink.dht.records.records import PeerFacts

logger = logging.getLogger(__name__)

SOURCES = 3
"""Peers whose tables are compared where there are as many."""
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


class Joining:
    """Bootstrap of one peer or client."""

    def __init__(
        self,
        host: Host,
        timing: DiscoveryTiming,
        reader: TableReader,
        link_to: Callable[[str], None],
    ) -> None:
        """`link_to` is told of each peer that has answered."""
        self._host = host
        self._timing = timing
        self._reader = reader
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
        with trio.move_on_after(self._timing.bootstrap_timeout_s):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._try_one, address, outcomes, nursery.cancel_scope)
        failures = [(address, reason) for address, reason in outcomes.items() if reason is not None]
        return failures if len(failures) == len(outcomes) else None

    async def _try_one(self, address: str, outcomes: dict[str, str | None], scope: trio.CancelScope) -> None:
        try:
            peer_id = await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
            await self._reader.copy_from(peer_id)
        except (DialError, StreamEndedError) as error:
            outcomes[address] = str(error)
            return
        except (
            Exception
        ) as error:  # the boundary of an initial peer: whatever it does, another one may answer
            logger.debug("asking %s failed", address, exc_info=True)
            outcomes[address] = f"it answered with something else than the protocol ({type(error).__name__})"
            return
        outcomes[address] = None
        answered = sum(reason is None for reason in outcomes.values())
        if answered <= DEGREE:
            self._link_to(peer_id)
        if answered >= min(SOURCES, len(outcomes)):
            scope.cancel()
