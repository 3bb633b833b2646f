"""When peers speak, by the product's rules and in its encodings, and who hears it."""

from dataclasses import replace

from numpy.random import Generator

from molink.dht import announcement_pb2 as pb
from molink.dht.announcement import seal_facts, seal_state
from molink.dht.records import LinkMeasurement, PeerState
from molink.dht.state_codec import state_from_message
from molink.dht.timing import (
    announcement_interval_s,
    change_spacing_s,
    facts_interval_s,
    repair_interval_s,
    state_ttl_s,
)
from molink.simnet.swarm.bulletin import Bulletin, Notice
from molink.simnet.swarm.member import TIMING, Member
from molink.simnet.swarm.traffic import ControlTraffic
from molink.simnet.swarm.volunteers import Volunteer
from molink.simnet.world.timeline import Alarm, Timeline

_CLOCK_MS = 1_800_000_000_000
"""What the wall clock says at the beginning, for sequence numbers of their usual length."""
_HEAD_BYTES = 65
"""Of a record, before its body."""
_LINKS = 16
"""Measured neighbours that facts name."""
_EPSILON_S = 1e-9


class Announcing:
    """Publishes for all members as `molink.dht.publisher` does for one: changes at once, within the pace, and what
    has not changed from time to time."""

    def __init__(
        self, timeline: Timeline, bulletin: Bulletin, traffic: ControlTraffic, rng: Generator
    ) -> None:
        self._timeline = timeline
        self._bulletin = bulletin
        self._traffic = traffic
        self._rng = rng
        self._alarms: dict[str, Alarm] = {}
        self._facts_bytes: dict[int, int] = {}
        self.living = 0

    def begin(self, member: Member) -> None:
        """A member that was there before the world began: it has spoken some time within its last interval."""
        now_s = self._timeline.now_s
        interval_s = announcement_interval_s(self.living, TIMING.interval_s)
        ago_s = float(self._rng.uniform(0.0, interval_s))
        state, size_bytes = self._sealed(member, interval_s, now_s)
        self._traffic.records["states"] += 1
        self._traffic.record_bytes["states"] += size_bytes
        self._traffic.records["facts"] += 1
        self._traffic.record_bytes["facts"] += self._size_of_facts(member.volunteer)
        member.told, member.told_s = member.state(), now_s - ago_s
        self._bulletin.put(Notice(member.volunteer.facts, state, now_s - ago_s))
        member.due_s = now_s + max(0.0, self._jittered(interval_s) - ago_s)
        self._watch(member)

    def join(self, member: Member) -> None:
        """A newcomer copies the table and tells everybody what it is."""
        now_s = self._timeline.now_s
        self._traffic.joined(len(self._bulletin), self.living, now_s)
        self._traffic.flooded("facts", self._size_of_facts(member.volunteer), self.living, now_s)
        member.pace = replace(member.pace, at=now_s)
        self._watch(member)
        self.changed(member)

    def changed(self, member: Member) -> None:
        """Something that the member announces may be another now."""
        if member.alive and not member.changed and member.state() != member.told:
            member.changed = True
            self._alarms[member.peer_id].set(max(self._timeline.now_s, member.told_s + TIMING.change_gap_s))

    def gone(self, member: Member, *, told: bool) -> None:
        """A member is gone; unless it crashed, everybody has heard so."""
        del self._alarms[member.peer_id]
        if told:
            now_s = self._timeline.now_s
            state, size_bytes = self._sealed(member, 0.0, now_s)
            self._traffic.flooded("states", size_bytes, self.living, now_s)
            self._bulletin.put(Notice(member.volunteer.facts, replace(state, ttl_s=0), now_s))

    def keep_up(self, lasting_s: float) -> None:
        """What all peers do at intervals, for the next `lasting_s` seconds."""
        now_s = self._timeline.now_s
        self._bulletin.expire(now_s)
        known = len(self._bulletin)
        interval_s = repair_interval_s(known, TIMING.repair_interval_s)
        self._traffic.repaired(known, interval_s, now_s, lasting_s)
        # unchanged facts, said again: each member's in its turn
        size_bytes = round(self._traffic.mean_bytes("facts"))
        each_s = facts_interval_s(known, TIMING.facts_interval_s)
        repeats = int(self._rng.poisson(self.living * lasting_s / each_s))
        for _ in range(repeats):
            self._traffic.flooded("facts", size_bytes, self.living, now_s)

    def _watch(self, member: Member) -> None:
        alarm = Alarm(self._timeline, lambda: self._ring(member))
        self._alarms[member.peer_id] = alarm
        if member.told is not None:
            alarm.set(member.due_s)

    def _ring(self, member: Member) -> None:
        if not member.alive:
            return
        now_s, alarm = self._timeline.now_s, self._alarms[member.peer_id]
        if not member.changed and now_s < member.due_s - _EPSILON_S:
            alarm.set(member.due_s)
            return
        spacing_s = change_spacing_s(len(self._bulletin))
        member.pace = member.pace.after(now_s, TIMING, spacing_s)
        wait_s = member.pace.wait_s(TIMING, spacing_s)
        if wait_s > _EPSILON_S:
            alarm.set(now_s + wait_s)
            return
        member.pace = member.pace.spent()
        interval_s = announcement_interval_s(len(self._bulletin), TIMING.interval_s)
        state, size_bytes = self._sealed(member, interval_s, now_s)
        self._traffic.flooded("states", size_bytes, self.living, now_s)
        self._bulletin.put(Notice(member.volunteer.facts, state, now_s))
        member.told, member.told_s, member.changed = member.state(), now_s, False
        member.due_s = now_s + self._jittered(interval_s)
        alarm.set(member.due_s)

    def _sealed(self, member: Member, interval_s: float, now_s: float) -> tuple[PeerState, int]:
        """The state as others read it, and the size of its record."""
        sequence = _CLOCK_MS + int(1000 * now_s)
        state = replace(
            member.state(),
            sequence=sequence,
            facts_sequence=_CLOCK_MS,
            ttl_s=state_ttl_s(interval_s, TIMING.jitter) if interval_s else 0,
        )
        record = seal_state(state, member.volunteer.identity)
        return state_from_message(pb.State.FromString(record[_HEAD_BYTES:]), member.peer_id), len(record)

    def _size_of_facts(self, volunteer: Volunteer) -> int:
        """Of a record with measured neighbours; of one kind of machine they are all alike."""
        if volunteer.kind not in self._facts_bytes:
            links = tuple(LinkMeasurement(volunteer.peer_id, 10.0 + at) for at in range(_LINKS))
            facts = replace(volunteer.facts, links=links, sequence=_CLOCK_MS, ttl_s=1)
            self._facts_bytes[volunteer.kind] = len(seal_facts(facts, volunteer.identity))
        return self._facts_bytes[volunteer.kind]

    def _jittered(self, seconds: float) -> float:
        return seconds * float(self._rng.uniform(1 - TIMING.jitter, 1 + TIMING.jitter))
