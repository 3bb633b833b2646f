"""Anti-entropy: one peer hands the other the signed records that it holds, with their ages.

Pull anti-entropy (Demers et al., "Epidemic algorithms for replicated database maintenance", 1987, section 1.3).

Who knows most of them says what it holds, 16 bytes a peer, and gets what is newer: where many that nobody can dial
compare their tables with few, it is the many that pay for what is compared. What does not fit into one question is
compared the other way round: digests are asked for first, and then the records that are newer.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import trio
from google.protobuf.message import DecodeError

from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import StreamEndedError
from molink.dht.membership.directory import Accepted
from molink.dht.membership.door import ConnectionLimiter, ConnectionLimits, network_of
from molink.dht.membership.held import AgedRecord
from molink.dht.membership.membership import Membership
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import (
    MAX_FACTS_BYTES,
    MAX_STATE_BYTES,
    AnnouncementError,
    Reason,
    state_tag,
)
from molink.dht.records.bounds import MAX_SEQUENCE, whole

logger = logging.getLogger(__name__)

PROTOCOL = "/molink/table/2"
MAX_TAGS = 256
MAX_ENTRIES = 20_000
_MAX_REQUEST_BYTES = MAX_TAGS * (8 + 10) + 32
_MAX_ENTRY_BYTES = MAX_FACTS_BYTES + MAX_STATE_BYTES + 32
_BATCH = 64
DIGESTS = 256
"""In one frame."""
_MAX_DIGEST_BYTES = DIGESTS * 18 + 16
HOT_S = 60.0
"""In which a record reaches all, and it is no older by much to whom it is then announced."""
_MOST_DELAY_S = 2.0
"""Of an answer that is to bring two tables together, where this peer has sent much of late."""
LIMITS = ConnectionLimits(unproven=64, proven=32, of_network=16, of_identity=2, proof_s=2.0, idle_s=2.0)
"""Callers who have not asked yet are unproven, those whose answer takes longer than two seconds are idle."""
_FREE_ENTRIES = 1024
"""That an identity gets at once beside two whole tables, and again in REGAINED_S: tables of small swarms are copied
whole for as long as that lasts."""
REGAINED_S = 300.0
COUNT_EVERY_S = 10.0
_MOST_REMEMBERED = 4096
"""Identities."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a pull."""

    entries: int
    news: int
    """Records that were true and new."""
    wanted: tuple[int, ...]
    """Tags of peers whose facts are missing here."""
    hot: tuple[tuple[bytes, Accepted], ...] = ()
    """Records that were true, new and said within `HOT_S`: they are on their way, and others may lack them too."""


class TableAllowances:
    """Allowances of entries by identity, each a token bucket. Pure, and bounded: who asked longest ago is forgotten."""

    def __init__(self) -> None:
        self._owed: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Entries, and when they were counted."""

    def has_left(self, peer_id: str, peers: int, now: float) -> bool:
        """Whether that identity may ask a table of so many peers for more now."""
        return self._owed_by(peer_id, peers, now) <= _most_entries(peers)

    def spend(self, peer_id: str, entries: int, peers: int, now: float) -> None:
        """Counts what it was sent."""
        self._owed[peer_id] = self._owed_by(peer_id, peers, now) + entries, now
        self._owed.move_to_end(peer_id)
        if len(self._owed) > _MOST_REMEMBERED:
            self._owed.popitem(last=False)

    def __len__(self) -> int:
        return len(self._owed)

    def _owed_by(self, peer_id: str, peers: int, now: float) -> float:
        owed, at = self._owed.get(peer_id, (0.0, now))
        return max(0.0, owed - (now - at) * _most_entries(peers) / REGAINED_S)


def _most_entries(peers: int) -> int:
    return 2 * peers + _FREE_ENTRIES


class TableService:
    """Anti-entropy server: answers pulls.

    Who opens a stream and asks nothing takes nobody's place. Of one identity two callers are answered at a time, of one
    network sixteen, of all thirty-two; where there is no room, one whose answer takes longer than two seconds goes, and
    may ask another peer. So may one that has been sent two whole tables, and as much of them again only as time passes.
    """

    def __init__(
        self,
        membership: Membership,
        traffic: TrafficCounters,
        *,
        timeout_s: float,
        host_of: Callable[[str], str],
        is_member: Callable[[str], bool],
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        """`host_of`: the IP address of a connected peer. `limits` of callers."""
        self._membership = membership
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._host_of = host_of
        self._limits = limits
        self._limiter = ConnectionLimiter(limits, is_member)
        self._callers: dict[int, trio.CancelScope] = {}
        self._allowances = TableAllowances()
        self._counted, self._counted_s = 0, -COUNT_EVERY_S
        """How many peers the table had, and when."""

    async def serve(self, stream: CompressedStream) -> None:
        entry = self._limiter.admit(trio.current_time(), network_of(self._host_of(stream.peer_id)))
        self._send_away(entry.sent_away)
        caller = entry.guest or 0
        answered = False
        try:
            with trio.CancelScope() as self._callers[caller]:
                answered = await self._answer(stream, caller)
        finally:
            del self._callers[caller]
            self._limiter.remove_guest(caller)
            self._traffic.count_received("table", stream.bytes_in)
            self._traffic.count_sent("table", stream.bytes_out)
        await (stream.close() if answered else stream.reset())

    async def _answer(self, stream: CompressedStream, caller: int) -> bool:
        """Whether all has been sent."""
        with trio.move_on_after(self._limits.proof_s) as asking:
            request = pb.TableRequest.FromString(await stream.receive(_MAX_REQUEST_BYTES))
        if asking.cancelled_caught:
            return False
        entry = self._limiter.prove(caller, trio.current_time(), stream.peer_id)
        self._send_away(entry.sent_away)
        if entry.guest is None or not _is_bounded(request):
            return False
        if not self._allowances.has_left(stream.peer_id, self._peers(), trio.current_time()):
            return False
        self._limiter.mark_busy(caller)
        with trio.move_on_after(self._timeout_s) as answering:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lose_patience, caller)
                await self._send(stream, request)
                nursery.cancel_scope.cancel()
        return not answering.cancelled_caught

    async def _lose_patience(self, caller: int) -> None:
        await trio.sleep(self._limits.idle_s)
        self._limiter.mark_idle(caller, trio.current_time())

    async def _send(self, stream: CompressedStream, request: pb.TableRequest) -> None:
        # one is of who has just been heard of, or of who asks how it is shown
        if len(request.peer_tags) != 1 or request.sequences:
            await self._traffic.wait_turn(_MOST_DELAY_S)
        batch: list[bytes] = []
        sent = 0
        try:
            for entry in _entries(self._membership, request):
                batch.append(entry)
                if len(batch) == _BATCH:
                    sent += _BATCH
                    await stream.send(batch)
                    batch.clear()
            sent += len(batch)
            await stream.send([*batch, b""])
        finally:
            self._allowances.spend(stream.peer_id, sent, self._peers(), trio.current_time())

    def _peers(self) -> int:
        """Roughly, since who asks for a few peers has the others not looked at."""
        if trio.current_time() >= self._counted_s + COUNT_EVERY_S:
            self._counted, self._counted_s = self._membership.peers(), trio.current_time()
        return self._counted

    def _send_away(self, callers: tuple[int, ...]) -> None:
        for caller in callers:
            self._callers[caller].cancel()


def _is_bounded(request: pb.TableRequest) -> bool:
    """Whether a request is one that this protocol knows."""
    tags, sequences = len(request.peer_tags), len(request.sequences)
    return tags <= MAX_TAGS and (not sequences or sequences == tags)


def _entries(membership: Membership, request: pb.TableRequest) -> Iterator[bytes]:
    if request.digests:
        digests = membership.digests()[:MAX_ENTRIES]
        for at in range(0, len(digests), DIGESTS):
            tags, sequences = zip(*digests[at : at + DIGESTS], strict=True)
            yield pb.Digest(peer_tags=tags, sequences=sequences).SerializeToString()
        return
    if request.sequences:
        held = dict(zip(request.peer_tags, request.sequences, strict=True))
        for record in membership.table(held=held)[:MAX_ENTRIES]:
            yield _encode(record, states_only=record.peer_tag in held)
        return
    for record in membership.table(tuple(request.peer_tags))[:MAX_ENTRIES]:
        yield _encode(record, states_only=request.states_only)


def _encode(record: AgedRecord, *, states_only: bool) -> bytes:
    return pb.TableEntry(
        facts=b"" if states_only else record.facts,
        state=record.state,
        facts_age_ms=int(1000 * record.facts_age_s),
        state_age_ms=int(1000 * record.state_age_s),
    ).SerializeToString()


async def pull(
    stream: CompressedStream,
    membership: Membership,
    *,
    tags: Collection[int] = (),
    states_only: bool = False,
    held: Sequence[tuple[int, int]] = (),
    timeout_s: float,
) -> PullResult:
    """Copies the other side's records into `membership`, which checks every one. `held`: tag and sequence of the states
    that are here, of at most MAX_TAGS peers; in place of `tags` it asks for what is newer, with the facts of others
    only.

    Raises:
        StreamEndedError: the other side does not answer, or not in this protocol.
    """
    wanted_of = [tag for tag, _ in held] or sorted(tags)[:MAX_TAGS]
    sequences = [sequence for _, sequence in held]
    request = pb.TableRequest(peer_tags=wanted_of, states_only=states_only, sequences=sequences)
    entries = news = 0
    wanted: list[int] = []
    hot: list[tuple[bytes, Accepted]] = []
    try:
        with trio.fail_after(timeout_s):
            await stream.send([request.SerializeToString()])
            while entries < MAX_ENTRIES and (frame := await stream.receive(_MAX_ENTRY_BYTES)):
                entries += 1
                outcome = _take_in(frame, membership, stream.peer_id)
                news += outcome.news
                wanted += outcome.wanted
                hot += outcome.hot
    except trio.TooSlowError:
        raise StreamEndedError(f"{stream.peer_id} did not send its table within {timeout_s:g} s") from None
    except DecodeError:
        raise StreamEndedError(f"{stream.peer_id} sent something else than a table") from None
    return PullResult(entries, news, tuple(wanted), tuple(hot))


async def newer_tags(
    stream: CompressedStream, membership: Membership, *, timeout_s: float
) -> tuple[int, ...]:
    """The tags of those peers of whom the other side has newer states than `membership`, or as new ones whose facts are
    missing there: what was copied last may have been cut short between the two. Each once, MAX_ENTRIES at most.

    Raises:
        StreamEndedError: the other side does not answer, or not in this protocol.
    """
    request = pb.TableRequest(digests=True)
    newer: list[int] = []
    entries = 0
    try:
        with trio.fail_after(timeout_s):
            await stream.send([request.SerializeToString()])
            while entries < MAX_ENTRIES and (frame := await stream.receive(_MAX_DIGEST_BYTES)):
                digests = digests_in(frame)
                entries += len(digests)
                newer += [tag for tag, sequence in digests if _is_wanted(tag, sequence, membership)]
    except trio.TooSlowError:
        raise StreamEndedError(f"{stream.peer_id} did not send its digests within {timeout_s:g} s") from None
    except ValueError:
        raise StreamEndedError(f"{stream.peer_id} sent something else than digests") from None
    return tuple(dict.fromkeys(newer))[:MAX_ENTRIES]


def _is_wanted(tag: int, sequence: int, membership: Membership) -> bool:
    known = membership.sequence_of(tag)
    return sequence > known or (sequence == known and membership.lacks_facts(tag))


def digests_in(frame: bytes) -> tuple[tuple[int, int], ...]:
    """Tag and sequence of the newest state of 1 to 256 peers. Raises ValueError if these are none."""
    try:
        message = pb.Digest.FromString(frame)
    except DecodeError as error:
        raise ValueError("the digests cannot be decoded") from error
    if not 1 <= len(message.peer_tags) == len(message.sequences) <= DIGESTS:
        raise ValueError(f"1 to {DIGESTS} tags and as many sequences make a frame of digests")
    return tuple(
        (tag, whole("sequence", sequence, MAX_SEQUENCE))
        for tag, sequence in zip(message.peer_tags, message.sequences, strict=True)
    )


def _take_in(frame: bytes, membership: Membership, source: str) -> PullResult:
    entry = pb.TableEntry.FromString(frame)
    news = 0
    hot: list[tuple[bytes, Accepted]] = []
    outcome: Accepted | Reason = Reason.STALE
    for record, age_ms in ((entry.facts, entry.facts_age_ms), (entry.state, entry.state_age_ms)):
        outcome = membership.receive(record, age_ms / 1000, source=source) if record else Reason.STALE
        if isinstance(outcome, Accepted):
            news += 1
            hot += [(record, outcome)] if age_ms <= 1000 * HOT_S else []
    lacks_facts = outcome.facts_wanted if isinstance(outcome, Accepted) else outcome is Reason.UNKNOWN_PEER
    return PullResult(1, news, _tag(entry.state) if lacks_facts else (), tuple(hot))


def _tag(record: bytes) -> tuple[int, ...]:
    try:
        return (state_tag(record),)
    except AnnouncementError:
        return ()
