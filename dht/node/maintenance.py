"""Maintenance of membership: dials neighbours, runs anti-entropy, expires records, and remembers addresses."""

import logging
import math
import random
from collections.abc import Sequence

import trio

from molink.dht.errors import BootstrapUnreachable
from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.gossip import Gossip
from molink.dht.gossip.sequences import DurableState, Sequences
from molink.dht.gossip.table_reader import TableReader
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, Host, peer_id_in
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.host.packed import CompressedStream
from molink.dht.membership.membership import Membership, tag_of
from molink.dht.membership.neighbours import Neighbour, network_at, to_dial, worth_remembering
from molink.dht.membership.timing import DEGREE, DiscoveryTiming, anti_entropy_interval_s
from molink.dht.node.hearing import Visibility, VisibilityMonitor, visibility_of
from molink.dht.node.joining import SOURCES

logger = logging.getLogger(__name__)

MOST_REMEMBERED = 32
HEDGE_S = 1.0
"""Who is asked for its table and has not answered within this time is not waited for alone."""
STAGGER_S = 0.25
"""Between the dials of one peer's addresses (RFC 8305, section 5)."""


class Maintenance:
    """Maintenance loop of one peer (`serves`) or client."""

    def __init__(
        self,
        host: Host,
        membership: Membership,
        timing: DiscoveryTiming,
        reader: TableReader,
        tasks: NeighbourTasks,
        initial_peers: Sequence[str],
        durable: DurableState | None,
        *,
        serves: bool,
    ) -> None:
        self._host = host
        self._membership = membership
        self._timing = timing
        self._reader = reader
        self._tasks = tasks
        self._initial_peers = tuple(
            address for address in initial_peers if peer_id_in(address) != host.peer_id
        )
        self._durable = durable
        self._serves = serves
        self._not_before: dict[str, float] = {}
        self._linking: dict[str, str] = {}
        """Peers that are being dialled, or whose link was dialled from here, and the networks of these."""
        self._visibility = VisibilityMonitor()
        now = trio.current_time()
        self._anti_entropy_due = now + self._jittered(timing.anti_entropy_interval_s)
        self._ask_due = now
        self._remember_due = now + self._jittered(timing.remember_s) / 10
        self.gossip: Gossip | None = None
        self.sequences: Sequences | None = None

    def schedule_anti_entropy(self) -> None:
        """Schedules anti-entropy with a neighbour within a few seconds."""
        soon = trio.current_time() + self._jittered(min(2.0, self._timing.anti_entropy_interval_s))
        self._anti_entropy_due = min(self._anti_entropy_due, soon)

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
                    self._not_before[peer_id] = trio.current_time() + self._jittered(self._timing.redial_s)
                    await self._host.hang_up(peer_id)
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
        try:
            await self._connect(peer_id, addresses)
            await self._reader.compare_with(peer_id)
        except (DialError, StreamEndedError) as error:
            return str(error)
        except Exception as error:  # the boundary of a source: another one may answer
            logger.debug("comparing tables with %s failed", peer_id, exc_info=True)
            return f"it answered with something else than the protocol ({type(error).__name__})"
        return None

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await trio.sleep(self._jittered(self._timing.upkeep_s))
            self._membership.expire()
            if self._serves:
                self._look_for_neighbours()
                self._look_whether_heard()
                if self._is_due(self._remember_due):
                    self._remember_due = trio.current_time() + self._jittered(self._timing.remember_s)
                    await self.remember()
            if self._is_due(self._anti_entropy_due):
                floor_s = (
                    self._timing.anti_entropy_interval_s if self._serves else self._timing.refresh_interval_s
                )
                self._anti_entropy_due = trio.current_time() + self._jittered(
                    anti_entropy_interval_s(self._membership.peers(), floor_s)
                )
                self._look_for_lost_initial_peers()
                await self._run_anti_entropy()

    async def remember(self) -> None:
        """Notes addresses of living members in the state directory, to begin from if the initial peers are gone."""
        linked = self.gossip.neighbours if self.gossip is not None else ()
        others = [facts for facts in self._membership.living() if facts.peer_id != self._host.peer_id]
        addresses = worth_remembering(others, linked, MOST_REMEMBERED)
        if self._durable is None or not addresses:
            return
        try:
            await trio.to_thread.run_sync(self._durable.remember_swarm, self._initial_peers, addresses)
        except OSError as error:
            logger.warning("the addresses of other peers cannot be noted: %s", error.strerror or error)

    async def _run_anti_entropy(self) -> None:
        neighbours = self.gossip.neighbours if self.gossip is not None else ()
        if neighbours:
            peer_id = random.choice(neighbours)
            with self._tasks.at_the_risk_of(peer_id):
                try:
                    await self._reader.compare_with(peer_id)
                except (DialError, StreamEndedError) as error:
                    logger.debug("comparing tables failed: %s", error)
            return
        try:  # without a link, tables are all that is heard
            await self.refresh()
        except BootstrapUnreachable as error:
            logger.debug("comparing tables failed: %s", error)

    def _look_whether_heard(self) -> None:
        """Asks somebody what it holds of this peer: soon after its first words, and from time to time."""
        if not self._is_due(self._ask_due) or self.sequences is None:
            return
        self._ask_due = trio.current_time() + self._jittered(self._timing.heard_s)
        sources = self._sources()
        if self.sequences.first is not None and sources:
            peer_id, addresses = sources[0]
            self._ask_due = math.inf
            self._tasks.start_soon(peer_id, self._ask_whether_heard, peer_id, addresses, self.sequences)

    async def _ask_whether_heard(
        self, peer_id: str, addresses: tuple[str, ...], sequences: Sequences
    ) -> None:
        outcome = Visibility.SILENT
        try:
            await self._connect(peer_id, addresses)
            held = await self._held_of_this(peer_id)
            outcome = visibility_of(sequences.first or 0, sequences.last, held)
        except (DialError, StreamEndedError) as error:
            logger.debug("%s does not say what it holds of this peer: %s", peer_id, error)
        finally:
            self._ask_due = trio.current_time() + self._jittered(self._timing.heard_s)
        ahead_s = (self._membership.own_sequence - sequences.last) / 1000
        line = self._visibility.record_answer(outcome, peer_id, self._membership.clock_ahead_s(), ahead_s)
        if line is not None:
            logger.warning("%s", line)
        if self._visibility.heard:
            self._ask_due = trio.current_time() + self._jittered(self._timing.anti_entropy_interval_s)

    async def _held_of_this(self, peer_id: str) -> int | None:
        self._membership.forget_last_heard_own()
        await self._reader.pull(peer_id, tags=(tag_of(self._host.peer_id),), states_only=True)
        return self._membership.last_heard_own

    def _is_due(self, at: float) -> bool:
        return trio.current_time() >= at

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """Whom to ask, in order: connected ones first, those that failed lately last."""
        now = trio.current_time()
        known = {facts.peer_id: facts.addresses for facts in self._membership.living()}
        for address in self._initial_peers:
            known.setdefault(peer_id_in(address), (address,))
        known.pop(self._host.peer_id, None)
        order = random.sample(sorted(known), len(known))
        order.sort(key=lambda peer: (self._not_before.get(peer, 0) > now, not self._host.is_connected(peer)))
        return [(peer_id, known[peer_id]) for peer_id in order[: 4 * SOURCES]]

    def _look_for_neighbours(self) -> None:
        """Dials others until so many links have been chosen here, however many others have chosen this peer."""
        linked = self.gossip.neighbours if self.gossip is not None else ()
        now = trio.current_time()
        self._not_before = {peer_id: at for peer_id, at in self._not_before.items() if at > now}
        dialled = {link.peer_id: link.network for link in self.gossip.dialled} if self.gossip else {}
        dialled |= self._linking
        if len(dialled) >= DEGREE:
            return
        addresses = {
            facts.peer_id: facts.addresses
            for facts in self._membership.living()
            if facts.addresses
            and facts.peer_id != self._host.peer_id
            and facts.peer_id not in linked
            and facts.peer_id not in dialled
            and facts.peer_id not in self._not_before
        }
        order = random.sample(sorted(addresses), len(addresses))
        candidates = [Neighbour(peer_id, network_at(addresses[peer_id][0])) for peer_id in order]
        for one in to_dial(candidates, dialled.values(), DEGREE - len(dialled)):
            self._link_to(one.peer_id, addresses[one.peer_id])

    def _look_for_lost_initial_peers(self) -> None:
        """A swarm that was cut in two has one meeting point: who everybody started from."""
        living = {facts.peer_id for facts in self._membership.living()}
        for address in self._initial_peers:
            if peer_id_in(address) not in living | self._not_before.keys():
                self._link_to(peer_id_in(address), (address,))

    def link_to(self, peer_id: str) -> None:
        """Opens a link to a peer that is connected already."""
        self._link_to(peer_id, ())

    def _link_to(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        if self._serves and peer_id not in self._linking:
            network = network_at(addresses[0]) if addresses else ""
            self._linking[peer_id] = network
            self._tasks.start_soon(peer_id, self._link, peer_id, network, addresses)

    async def _link(self, peer_id: str, network: str, addresses: tuple[str, ...]) -> None:
        """A link for as long as it lasts; then the peer is left alone for a while."""
        try:
            await self._connect(peer_id, addresses)
            stream = await self._host.open_stream(peer_id, GOSSIP, timeout_s=self._timing.dial_timeout_s)
        except DialError as error:
            logger.debug("no link to %s: %s", peer_id, error)
        else:
            if self.gossip is not None:
                await self.gossip.run_link(CompressedStream(stream), network, dialled=True)
        finally:
            self._linking.pop(peer_id, None)
            self._not_before[peer_id] = trio.current_time() + self._jittered(self._timing.redial_s)
        if self.gossip is not None and peer_id not in self.gossip.neighbours:
            await self._host.hang_up(peer_id)

    async def _connect(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """A connection to the peer, over whichever of its addresses answers first; each gets STAGGER_S before the
        next is tried beside it.

        Raises:
            DialError: none of them has answered.
        """
        failure = DialError(f"no address of {peer_id} is known")
        if self._host.is_connected(peer_id):
            return
        async with trio.open_nursery() as nursery:

            async def dial(address: str, ended: trio.Event) -> None:
                nonlocal failure
                try:
                    await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
                except DialError as error:
                    failure = error
                else:
                    nursery.cancel_scope.cancel()
                finally:
                    ended.set()

            for address in addresses:
                ended = trio.Event()
                nursery.start_soon(dial, address, ended)
                with trio.move_on_after(STAGGER_S):
                    await ended.wait()
        if self._host.is_connected(peer_id):
            return
        self._not_before[peer_id] = trio.current_time() + self._jittered(self._timing.redial_s)
        raise failure

    def _jittered(self, seconds: float) -> float:
        return seconds * random.uniform(1 - self._timing.jitter, 1 + self._timing.jitter)
