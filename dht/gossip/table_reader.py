"""Anti-entropy client: pulls records from other peers, all of them, those that are newer, or those of some peers."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

import trio

from molink.dht.gossip.copy_claims import CopyClaims
from molink.dht.gossip.table import MAX_TAGS, PROTOCOL, PullResult, newer_tags, pull
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.host import Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.membership.directory import Accepted
from molink.dht.membership.membership import Membership
from molink.dht.membership.timing import DiscoveryTiming

logger = logging.getLogger(__name__)

_MOST_ASKED = 64
"""Neighbours that are asked for facts at once: more than have links."""
_ASK_GAP_S = 2.0
"""From one question for facts to the next to one neighbour: all who speak of strangers are asked side by side, and what
that takes of this peer's line is theirs to cause."""


async def nothing() -> None:
    """Nothing is waited for."""


class TableReader:
    """Anti-entropy client of one peer or client. Its methods raise DialError and StreamEndedError."""

    def __init__(
        self,
        host: Host,
        membership: Membership,
        timing: DiscoveryTiming,
        traffic: TrafficCounters,
        tasks: NeighbourTasks,
    ) -> None:
        self._host = host
        self._membership = membership
        self._timing = timing
        self._traffic = traffic
        self._tasks = tasks
        self._wanted: dict[str, set[int]] = {}
        """By neighbour that is asked now, the tags of those whose facts it is to be asked for next."""
        self._claims = CopyClaims(timing.bootstrap_timeout_s / 3)
        self._released = trio.Event()
        self.after_pull: Callable[[], None] = lambda: None
        self.hot_pulled: Callable[[str, tuple[tuple[bytes, Accepted], ...]], None] = lambda *_: None
        """With peer id: records from there that are on their way through the swarm."""

    def facts_wanted(self, peer_id: str, tag: int) -> None:
        """Asks that neighbour soon, beside the others, whom it keeps waiting by no slow answer. If too much is wanted
        already, the next anti-entropy will find it."""
        wanted = self._wanted.get(peer_id)
        if wanted is not None and len(wanted) < MAX_TAGS:
            wanted.add(tag)
        elif wanted is None and len(self._wanted) < _MOST_ASKED:
            self._wanted[peer_id] = {tag}
            self._tasks.start_soon(peer_id, self._fetch_wanted, peer_id)
        else:
            logger.debug("too many facts are wanted: those of %016x wait", tag)

    async def _fetch_wanted(self, peer_id: str) -> None:
        """One question at a time, while more is wanted: many states of one unknown peer arrive before its facts do."""
        try:
            while tags := self._wanted[peer_id]:
                self._wanted[peer_id] = set()
                next_at = trio.current_time() + _ASK_GAP_S
                with self._tasks.at_the_risk_of(peer_id):
                    await self.pull(peer_id, tags=tags)
                await trio.sleep_until(next_at)
        finally:
            del self._wanted[peer_id]

    async def copy_from(self, peer_id: str, part_came: Callable[[], Awaitable[None]] = nothing) -> None:
        """What the peer knows and this one does not, but for what others give that are asked at the same time.
        `part_came` is waited for after each part but the last."""
        async with self._stream_to(peer_id) as stream:
            newer = await newer_tags(stream, self._membership, timeout_s=self._timing.table_timeout_s)
        held = {tag: self._membership.sequence_of(tag) for tag in newer}
        while held:
            part = self._claims.take(tuple(held), len(newer), trio.current_time())
            if part:
                try:
                    await self.pull(peer_id, tags=part)
                finally:
                    self._claims.release(part)
                    self._released.set()
                    self._released = trio.Event()
            else:
                with trio.CancelScope(deadline=self._claims.free_at(held)):
                    await self._released.wait()
            held = self._lacking(held, part)
            if part and held:
                await part_came()
                held = self._lacking(held)

    def _lacking(self, held: Mapping[int, int], asked: Sequence[int] = ()) -> dict[int, int]:
        """Those of the tags with the sequences held that were neither asked for nor given by another."""
        return {
            tag: sequence
            for tag, sequence in held.items()
            if tag not in asked and self._membership.sequence_of(tag) <= sequence
        }

    async def compare_with(self, peer_id: str) -> None:
        """Copies what the peer knows and this one does not.

        Facts that are missing after its answer are asked for of those peers only that this one has asked about: the
        states that an answer holds of others may be made up, 20,000 of them at no cost.
        """
        ours = self._membership
        held = {tag: sequence for tag, sequence in ours.digests() if not ours.lacks_facts(tag)}
        if 1 <= len(held) <= MAX_TAGS:
            pulled = await self.pull(peer_id, held=tuple(held.items()))
            await self._pull_parts(peer_id, _asked_for(pulled.wanted, held))
            return
        async with self._stream_to(peer_id) as stream:
            newer = await newer_tags(stream, ours, timeout_s=self._timing.table_timeout_s)
        lacking = {tag for tag in newer if ours.sequence_of(tag) < 0 or ours.lacks_facts(tag)}
        known, missing = [tag for tag in newer if tag not in lacking], list(lacking)
        for at in range(0, len(known), MAX_TAGS):
            part = known[at : at + MAX_TAGS]
            pulled = await self.pull(peer_id, tags=part, states_only=True)
            missing += _asked_for(pulled.wanted, part)
        await self._pull_parts(peer_id, missing)

    async def _pull_parts(self, peer_id: str, tags: Sequence[int]) -> None:
        for at in range(0, len(tags), MAX_TAGS):
            await self.pull(peer_id, tags=tags[at : at + MAX_TAGS])

    async def pull(
        self,
        peer_id: str,
        *,
        tags: Iterable[int] = (),
        states_only: bool = False,
        held: Sequence[tuple[int, int]] = (),
    ) -> PullResult:
        """The peer's records, or those of `tags` only, or what is newer than states of the tags and sequences held."""
        async with self._stream_to(peer_id) as stream:
            pulled = await pull(
                stream,
                self._membership,
                tags=tuple(tags),
                states_only=states_only,
                held=held,
                timeout_s=self._timing.table_timeout_s,
            )
        self.hot_pulled(peer_id, pulled.hot)
        return pulled

    @contextlib.asynccontextmanager
    async def _stream_to(self, peer_id: str) -> AsyncIterator[CompressedStream]:
        timeout_s = self._timing.dial_timeout_s
        stream = CompressedStream(await self._host.open_stream(peer_id, PROTOCOL, timeout_s=timeout_s))
        try:
            yield stream
        finally:
            self._traffic.count_received("table", stream.bytes_in)
            self._traffic.count_sent("table", stream.bytes_out)
            await stream.close()
            self.after_pull()


def _asked_for(wanted: Iterable[int], asked: Iterable[int]) -> tuple[int, ...]:
    """Those of the tags whose facts are missing that had been asked about, each once."""
    named = frozenset(asked)
    return tuple(tag for tag in dict.fromkeys(wanted) if tag in named)
