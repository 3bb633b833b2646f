"""Keeps a peer or client in touch with the swarm: whom to dial, what to ask for, what to forget."""

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import trio

from molink.dht.errors import BootstrapUnreachable
from molink.dht.framing import StreamEndedError
from molink.dht.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip import Gossip
from molink.dht.host import DialError, Host, peer_id_in
from molink.dht.membership import Membership
from molink.dht.packed import PackedStream
from molink.dht.table import MAX_TAGS, Pulled, newer_tags, pull
from molink.dht.table import PROTOCOL as TABLE
from molink.dht.timing import DEGREE, DiscoveryTiming, repair_interval_s
from molink.dht.traffic import Traffic

logger = logging.getLogger(__name__)

_SOURCES = 3
_WANTED = 64
HEDGE_S = 1.0
"""Who is asked for its table and has not answered within this time is not waited for alone."""
STAGGER_S = 0.25
"""Between the dials of one peer's addresses (RFC 8305, section 5)."""


class Upkeep:
    """Connections and pulls of one peer (`serves`) or client."""

    def __init__(
        self,
        host: Host,
        membership: Membership,
        timing: DiscoveryTiming,
        traffic: Traffic,
        initial_peers: Sequence[str],
        nursery: trio.Nursery,
        *,
        serves: bool,
    ) -> None:
        self._host = host
        self._membership = membership
        self._timing = timing
        self._traffic = traffic
        self._initial_peers = tuple(
            address for address in initial_peers if peer_id_in(address) != host.peer_id
        )
        self._nursery = nursery
        self._serves = serves
        self._not_before: dict[str, float] = {}
        self._linking: set[str] = set()
        self._wanted_in, self._wanted_out = trio.open_memory_channel[tuple[str, int]](_WANTED)
        self._copying = trio.Lock()
        self._repair_due = trio.current_time() + self._jittered(timing.repair_interval_s)
        self.gossip: Gossip | None = None
        self.after_pull: Callable[[], None] = lambda: None

    def facts_wanted(self, peer_id: str, tag: int) -> None:
        """Asks that neighbour soon; if too much is wanted already, the next repair will find it."""
        try:
            self._wanted_in.send_nowait((peer_id, tag))
        except trio.WouldBlock:
            logger.debug("too many facts are wanted: those of %016x wait", tag)

    def repair_soon(self) -> None:
        """Compares tables with a neighbour within a few seconds."""
        soon = trio.current_time() + self._jittered(min(2.0, self._timing.repair_interval_s))
        self._repair_due = min(self._repair_due, soon)

    async def bootstrap(self) -> None:
        """Connects to the initial peers, copies the swarm's records from the first that answers, and what others know
        beyond it from up to two more.

        Raises:
            BootstrapUnreachable: there are initial peers and none has answered in time.
        """
        if not self._initial_peers:
            return
        outcomes: dict[str, str | None] = dict.fromkeys(self._initial_peers, "no answer in time")
        with trio.move_on_after(self._timing.bootstrap_timeout_s):
            async with trio.open_nursery() as nursery:
                for address in self._initial_peers:
                    nursery.start_soon(self._bootstrap_from, address, outcomes, nursery.cancel_scope)
        failures = [(address, reason) for address, reason in outcomes.items() if reason is not None]
        if len(failures) == len(outcomes):
            raise BootstrapUnreachable(failures)

    async def _bootstrap_from(
        self, address: str, outcomes: dict[str, str | None], scope: trio.CancelScope
    ) -> None:
        try:
            peer_id = await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
            await self._copy_from(peer_id)
        except (DialError, StreamEndedError) as error:
            outcomes[address] = str(error)
            return
        outcomes[address] = None
        self._link_to(peer_id)
        if sum(reason is None for reason in outcomes.values()) >= min(_SOURCES, len(outcomes)):
            scope.cancel()

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
                try:
                    await self._connect(peer_id, addresses)
                    await self._compare_with(peer_id)
                except (DialError, StreamEndedError) as error:
                    failures.append((peer_id, str(error)))
                    self._not_before[peer_id] = trio.current_time() + self._jittered(self._timing.redial_s)
                    await self._host.hang_up(peer_id)
                else:
                    answered.append(peer_id)
                    if len(answered) >= _SOURCES - 1:
                        nursery.cancel_scope.cancel()
                finally:
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

    async def run(self) -> None:
        """Runs until cancelled."""
        self._nursery.start_soon(self._fetch_wanted)
        while True:
            await trio.sleep(self._jittered(self._timing.upkeep_s))
            self._membership.expire()
            if self._serves:
                self._look_for_neighbours()
            if trio.current_time() >= self._repair_due:
                floor_s = self._timing.repair_interval_s if self._serves else self._timing.refresh_interval_s
                self._repair_due = trio.current_time() + self._jittered(
                    repair_interval_s(self._membership.peers(), floor_s)
                )
                self._look_for_lost_initial_peers()
                await self._repair()

    async def _repair(self) -> None:
        try:
            if self.gossip is not None and self.gossip.neighbours:
                await self._compare_with(random.choice(self.gossip.neighbours))
            elif not self._serves:
                await self.refresh()
        except (DialError, StreamEndedError, BootstrapUnreachable) as error:
            logger.debug("comparing tables failed: %s", error)

    async def _fetch_wanted(self) -> None:
        """One question at a time: many states of one unknown peer arrive before its facts do."""
        async for peer_id, first in self._wanted_out:
            tags = {first}
            while len(tags) < MAX_TAGS:
                try:
                    other, tag = self._wanted_out.receive_nowait()
                except trio.WouldBlock:
                    break
                tags |= {tag} if other == peer_id else set()
            try:
                await self._pull(peer_id, tags=tags)
            except (DialError, StreamEndedError) as error:
                logger.debug("%s did not tell the facts it knows: %s", peer_id, error)

    async def _copy_from(self, peer_id: str) -> None:
        """All that the peer knows, unless somebody else's table is here by then: who is slow keeps nobody waiting."""
        with trio.move_on_after(self._timing.bootstrap_timeout_s / 3) as waiting:
            await self._copying.acquire()
        try:
            if self._membership.peers():
                await self._compare_with(peer_id)
            else:
                await self._pull(peer_id)
        finally:
            if not waiting.cancelled_caught:
                self._copying.release()

    async def _compare_with(self, peer_id: str) -> None:
        """Copies what the peer knows and this one does not."""
        async with self._stream_to(peer_id) as stream:
            newer = await newer_tags(stream, self._membership, timeout_s=self._timing.table_timeout_s)
        known = [tag for tag in newer if self._membership.sequence_of(tag) >= 0]
        missing = [tag for tag in newer if self._membership.sequence_of(tag) < 0]
        for at in range(0, len(known), MAX_TAGS):
            pulled = await self._pull(peer_id, tags=known[at : at + MAX_TAGS], states_only=True)
            missing += pulled.wanted
        for at in range(0, len(missing), MAX_TAGS):
            await self._pull(peer_id, tags=missing[at : at + MAX_TAGS])

    async def _pull(self, peer_id: str, *, tags: Iterable[int] = (), states_only: bool = False) -> Pulled:
        async with self._stream_to(peer_id) as stream:
            return await pull(
                stream,
                self._membership,
                tags=tuple(tags),
                states_only=states_only,
                timeout_s=self._timing.table_timeout_s,
            )

    @contextlib.asynccontextmanager
    async def _stream_to(self, peer_id: str) -> AsyncIterator[PackedStream]:
        timeout_s = self._timing.dial_timeout_s
        stream = PackedStream(await self._host.open_stream(peer_id, TABLE, timeout_s=timeout_s))
        try:
            yield stream
        finally:
            self._traffic.received("table", stream.bytes_in)
            self._traffic.sent("table", stream.bytes_out)
            await stream.close()
            self.after_pull()

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """Whom to ask, in order: connected ones first, those that failed lately last."""
        now = trio.current_time()
        known = {facts.peer_id: facts.addresses for facts in self._membership.living()}
        for address in self._initial_peers:
            known.setdefault(peer_id_in(address), (address,))
        known.pop(self._host.peer_id, None)
        order = random.sample(sorted(known), len(known))
        order.sort(key=lambda peer: (self._not_before.get(peer, 0) > now, not self._host.is_connected(peer)))
        return [(peer_id, known[peer_id]) for peer_id in order[: 4 * _SOURCES]]

    def _look_for_neighbours(self) -> None:
        taken = {*(self.gossip.neighbours if self.gossip else ()), *self._linking}
        now = trio.current_time()
        self._not_before = {peer_id: at for peer_id, at in self._not_before.items() if at > now}
        for peer_id, addresses in self._sources() if len(taken) < DEGREE else ():
            if len(taken) >= DEGREE:
                return
            if peer_id not in taken and addresses and peer_id not in self._not_before:
                taken.add(peer_id)
                self._link_to(peer_id, addresses)

    def _look_for_lost_initial_peers(self) -> None:
        """A swarm that was cut in two has one meeting point: who everybody started from."""
        living = {facts.peer_id for facts in self._membership.living()}
        for address in self._initial_peers:
            if peer_id_in(address) not in living | self._not_before.keys():
                self._link_to(peer_id_in(address), (address,))

    def _link_to(self, peer_id: str, addresses: tuple[str, ...] = ()) -> None:
        if self._serves and peer_id not in self._linking:
            self._linking.add(peer_id)
            self._nursery.start_soon(self._link, peer_id, addresses)

    async def _link(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """A link for as long as it lasts; then the peer is left alone for a while."""
        try:
            await self._connect(peer_id, addresses)
            stream = await self._host.open_stream(peer_id, GOSSIP, timeout_s=self._timing.dial_timeout_s)
        except DialError as error:
            logger.debug("no link to %s: %s", peer_id, error)
        else:
            if self.gossip is not None:
                await self.gossip.run_link(PackedStream(stream), dialled=True)
        finally:
            self._linking.discard(peer_id)
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
