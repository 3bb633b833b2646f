"""Maintenance of membership: dials neighbours, runs anti-entropy, expires records, and remembers addresses."""

import logging
import math
import random

import trio

from molink.dht.errors import BootstrapUnreachable
from molink.dht.gossip.table_reader import TableReader
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, Host, peer_id_in
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.membership.membership import Membership
from molink.dht.membership.neighbours import redial_spread_s, worth_remembering
from molink.dht.membership.timing import anti_entropy_interval_s
from molink.dht.node.gossip_links import GossipLinks, jittered
from molink.dht.node.joining import SOURCES, NetworkSettings
from molink.dht.node.visibility_check import VisibilityCheck

logger = logging.getLogger(__name__)

MOST_REMEMBERED = 32
ANTI_ENTROPY_S = 30.0
"""Within which a comparison of tables ends: nothing else is maintained meanwhile. What it has brought by then stays."""
HEDGE_S = 1.0
"""Who is asked for its table and has not answered within this time is not waited for alone."""


class Maintenance:
    """Maintenance loop of one peer (`serves`) or client."""

    def __init__(
        self,
        host: Host,
        settings: NetworkSettings,
        membership: Membership,
        reader: TableReader,
        tasks: NeighbourTasks,
        links: GossipLinks,
        visibility: VisibilityCheck,
    ) -> None:
        self._host = host
        self._membership = membership
        self._timing = settings.timing
        self._reader = reader
        self._tasks = tasks
        self._links = links
        self._visibility = visibility
        self._initial_peers = tuple(
            address for address in settings.initial_peers if peer_id_in(address) != host.peer_id
        )
        self._durable = settings.durable
        self._serves = settings.listen is not None
        now, timing = trio.current_time(), settings.timing
        self._anti_entropy_due = now + jittered(timing, timing.anti_entropy_interval_s)
        self._remember_due = now + jittered(timing, timing.remember_s) / 10

    def schedule_anti_entropy(self) -> None:
        """Schedules anti-entropy with a neighbour, as there is a new link: within a few seconds, but later, when names
        have told it most, where many peers change links at once and this one has others."""
        soon_s = jittered(self._timing, self._soon_s())
        if self._links.gossip is not None and len(self._links.neighbours) > 1:
            soon_s += random.uniform(0.5, 1.0) * redial_spread_s(self._links.gossip.copies)
        soon = trio.current_time() + soon_s
        self._anti_entropy_due = min(self._anti_entropy_due, soon)

    def _soon_s(self) -> float:
        return min(2.0, self._timing.anti_entropy_interval_s)

    async def refresh(self) -> None:
        """Copies what is new from two living peers, or from as many as answer.

        Whom it asks, it asks one after the other while they answer; who takes longer than HEDGE_S is not waited for
        by the next. Peers that claim the same addresses are asked one at a time, so one of them is dialled.

        Raises:
            BootstrapUnreachable: nobody could be asked; each peer tried, and why it failed.
        """
        failures: list[tuple[str, str]] = []
        answered: list[str] = []
        claimed: set[tuple[str, ...]] = set()
        async with trio.open_nursery() as nursery:

            async def ask(peer_id: str, addresses: tuple[str, ...], ended: trio.Event) -> None:
                reason = await self._failure_to_compare(peer_id, addresses)
                if reason is None:
                    answered.append(peer_id)
                    if len(answered) >= SOURCES - 1:
                        nursery.cancel_scope.cancel()
                else:
                    failures.append((peer_id, reason))
                    self._links.record_failure(peer_id)
                ended.set()

            for peer_id, addresses in self._sources():
                places = tuple(address.partition("/p2p/")[0] for address in addresses)
                if places in claimed:
                    continue
                claimed.add(places)
                ended = trio.Event()
                nursery.start_soon(ask, peer_id, addresses, ended)
                with trio.move_on_after(HEDGE_S):
                    await ended.wait()
            if answered:  # one may do: who is slow keeps nobody waiting
                nursery.cancel_scope.cancel()
        if failures and not answered:
            raise BootstrapUnreachable(failures)

    async def _failure_to_compare(self, peer_id: str, addresses: tuple[str, ...]) -> str | None:
        """Hangs up on who has failed."""
        asked_at = trio.current_time()
        try:
            await self._links.connect(peer_id, addresses)
            asked_at = trio.current_time()
            await self._reader.compare_with(peer_id)
        except (DialError, StreamEndedError) as error:
            failure = str(error)
        except Exception as error:  # the boundary of a source: another one may answer
            logger.debug("comparing tables with %s failed", peer_id, exc_info=True)
            failure = f"it answered with something else than the protocol ({type(error).__name__})"
        else:
            return None
        await self._host.hang_up(peer_id, opened_by=asked_at)
        return failure

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await trio.sleep(jittered(self._timing, self._timing.upkeep_s))
            judged = self._membership.expire()
            if self._links.gossip is not None:
                self._links.gossip.announce_judged(judged)
            if self._serves:
                self._links.open_missing(self._membership.living())
                self._visibility.look(self._sources)
                if trio.current_time() >= self._remember_due:
                    self._remember_due = trio.current_time() + jittered(self._timing, self._timing.remember_s)
                    await self.remember()
            if trio.current_time() >= self._anti_entropy_due:
                floor_s = (
                    self._timing.anti_entropy_interval_s if self._serves else self._timing.refresh_interval_s
                )
                copies = self._links.gossip.copies if self._links.gossip is not None else 1.0
                entries = math.ceil(self._membership.peers() * copies)
                self._anti_entropy_due = trio.current_time() + jittered(
                    self._timing, anti_entropy_interval_s(entries, floor_s)
                )
                self._look_for_lost_initial_peers()
                await self._run_anti_entropy()

    async def remember(self) -> None:
        """Notes addresses of living members in the state directory, to begin from if the initial peers are gone."""
        others = [facts for facts in self._membership.living() if facts.peer_id != self._host.peer_id]
        addresses = worth_remembering(others, self._links.neighbours, MOST_REMEMBERED)
        if self._durable is None or not addresses:
            return
        try:
            await trio.to_thread.run_sync(self._durable.remember_swarm, self._initial_peers, addresses)
        except OSError as error:
            logger.warning("the addresses of other peers cannot be noted: %s", error.strerror or error)

    async def _run_anti_entropy(self) -> None:
        with trio.move_on_after(ANTI_ENTROPY_S) as comparing:
            await self._compare_tables()
        if comparing.cancelled_caught:
            logger.debug("comparing tables was not over within %g s", ANTI_ENTROPY_S)

    async def _compare_tables(self) -> None:
        neighbours = self._links.neighbours
        if neighbours:
            peer_id = random.choice(neighbours)
            with self._tasks.at_the_risk_of(peer_id):
                try:
                    await self._reader.compare_with(peer_id)
                except (DialError, StreamEndedError) as error:
                    logger.debug("comparing tables failed: %s", error)
                    self._anti_entropy_due = trio.current_time() + jittered(self._timing, self._soon_s())
            return
        try:  # without a link, tables are all that is heard
            await self.refresh()
        except BootstrapUnreachable as error:
            logger.debug("comparing tables failed: %s", error)

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns whom to ask, in order: connected ones first, those that failed lately last."""
        known = {facts.peer_id: facts.addresses for facts in self._membership.living()}
        for address in self._initial_peers:
            known.setdefault(peer_id_in(address), (address,))
        known.pop(self._host.peer_id, None)
        asked = [peer for peer, addresses in known.items() if addresses or self._host.is_connected(peer)]
        order = random.sample(sorted(asked), len(asked))
        order.sort(key=lambda peer: (self._links.failed_lately(peer), not self._host.is_connected(peer)))
        return [(peer_id, known[peer_id]) for peer_id in order[: 4 * SOURCES]]

    def _look_for_lost_initial_peers(self) -> None:
        """A swarm that was cut in two has one meeting point: who everybody started from."""
        living = {facts.peer_id for facts in self._membership.living()}
        for address in self._initial_peers:
            if peer_id_in(address) not in living and not self._links.failed_lately(peer_id_in(address)):
                self._links.open(peer_id_in(address), (address,))
