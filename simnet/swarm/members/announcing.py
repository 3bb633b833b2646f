"""What peers say, in the product's encodings, and who hears it; when they do each one's `AnnouncingCore` decides."""

import hashlib
import math
from dataclasses import replace

from numpy.random import Generator

from molink.dht.membership import announcing_core as core
from molink.dht.membership.failure_detector import WITNESSES
from molink.dht.membership.neighbours import link_counts
from molink.dht.membership.timing import (
    FACTS_COST_BITS,
    LOSS_COST_BITS,
    NEWS_BUDGET_BITS_PER_S,
    STATE_COST_BITS,
    NewsRate,
    announced_links,
    announcement_interval_s,
    anti_entropy_interval_s,
    facts_interval_s,
    state_ttl_s,
)
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import sign_facts, sign_loss, sign_state
from molink.dht.records.records import LinkMeasurement, PeerLoss, PeerState
from molink.dht.records.state_codec import peer_tag, state_from_message
from molink.simnet.core.timeline import Alarm, Timeline
from molink.simnet.swarm.members.bulletin import Bulletin, Notice
from molink.simnet.swarm.members.member import TIMING, Member
from molink.simnet.swarm.members.traffic import ControlTraffic
from molink.simnet.swarm.population.volunteers import Volunteer

_CLOCK_MS = 1_800_000_000_000
"""What the wall clock says at the beginning, for sequence numbers of their usual length."""
_HEAD_BYTES = 65
"""Of a record, before its body."""
_LINKS = 16
"""Neighbours that a peer measures."""
_NOISE = 0.1
"""By how much two measurements of one kind of machine differ."""
_SAMPLE = 64
"""Members whose entries are packed before the world begins, for the mean size of the others'."""
_REMEASURED_S = 60.0
"""After it joins, a newcomer has measured its line, and has other facts."""
LOSS_BELIEVED_S = TIMING.silence_s + TIMING.redial_before_loss_s + TIMING.dial_timeout_s + TIMING.refute_s
"""After a crash: neighbours hear nothing, dial, and tell; nobody refutes it."""
_STATES_OF_ONE = 3
"""That a newcomer announces, before the world has shown how many these are."""


class AnnouncementDriver:
    """Drives the announcing cores of all members in virtual time."""

    def __init__(
        self, timeline: Timeline, bulletin: Bulletin, traffic: ControlTraffic, rng: Generator
    ) -> None:
        self._timeline = timeline
        self._bulletin = bulletin
        self._traffic = traffic
        self._rng = rng
        self._alarms: dict[str, Alarm] = {}
        self._members: dict[str, Member] = {}
        self._settled_s = math.inf
        self._copies = 1.0
        self.living = 0

    def settled(self, arrivals_per_s: float, copies: float) -> None:
        """The swarm has been as large for long, and as many come: they have counted the news, and speak as often as
        that leaves room for. `copies`: of each record, that a peer sends which can be dialled."""
        self._copies = copies
        others = arrivals_per_s * (FACTS_COST_BITS + _STATES_OF_ONE * STATE_COST_BITS)
        carried = math.ceil(self.living * copies)
        self._settled_s = announcement_interval_s(carried, others * copies, math.inf, TIMING.interval_s)
        news = others + self.living * STATE_COST_BITS / self._settled_s
        self._traffic.news = NewsRate(min(news, NEWS_BUDGET_BITS_PER_S), self._timeline.now_s)

    def begin(self, member: Member) -> None:
        """A member that was there before the world began: it has spoken some time within its last interval."""
        now_s, interval_s = self._timeline.now_s, self._settled_s
        ago_s = float(self._rng.uniform(0.0, interval_s))
        state, record = self._sealed(member, member.state(), state_ttl_s(interval_s, TIMING.jitter))
        if len(self._alarms) < _SAMPLE:
            facts = self._facts_record(member.volunteer)
            self._traffic.gossip.add("facts", facts)
            entry = pb.TableEntry(facts=facts, state=record, facts_age_ms=2**21, state_age_ms=2**21)
            self._traffic.entries.add("entry", entry.SerializeToString())
            entry.ClearField("facts")
            self._traffic.newer_states.add("entry", entry.SerializeToString())
        member.told = member.state()
        self._bulletin.put(Notice(member.volunteer.facts, state, now_s - ago_s))
        due_s = now_s + max(0.0, interval_s * (1 + self._draw() * TIMING.jitter) - ago_s)
        facts_every_s = facts_interval_s(self.living, TIMING.facts_interval_s)
        facts_due_s = now_s + float(self._rng.uniform(0.0, facts_every_s))
        member.speech = core.AnnouncingCore.standing(TIMING, now_s - ago_s, interval_s, due_s, facts_due_s)
        self._watch(member).set(due_s)

    def join(self, member: Member) -> None:
        """A newcomer copies the table and tells everybody what it is."""
        self._traffic.joined(len(self._bulletin), self.living, self._timeline.now_s)
        self._watch(member)
        self._tell(member, core.Changed(facts=True))
        self._timeline.call(_REMEASURED_S, lambda: self._tell(member, core.Changed(facts=True)))

    def changed(self, member: Member) -> None:
        """Something that the member announces may be another now."""
        if member.alive and not member.speech.has_news and member.state() != member.told:
            self._tell(member, core.Changed())

    def facts_changed(self, member: Member) -> None:
        """The member has other facts now."""
        self._tell(member, core.Changed(facts=True))

    def gone(self, member: Member, *, told: bool) -> None:
        """A member is gone. Everybody has heard so, or, if it crashed, hears so from its neighbours."""
        del self._alarms[member.peer_id], self._members[member.peer_id]
        if not told:
            self._timeline.call(LOSS_BELIEVED_S - TIMING.refute_s, lambda: self._lost(member))
            self._timeline.call(LOSS_BELIEVED_S, lambda: self._take_back(member))
            return
        _, record = self._sealed(member, core.farewell(member.state()), 0)
        self._traffic.flooded("states", record, self.living, self._timeline.now_s, STATE_COST_BITS)
        self._take_back(member)

    def keep_up(self, lasting_s: float) -> None:
        """What all peers do at intervals, for the next `lasting_s` seconds."""
        now_s = self._timeline.now_s
        self._bulletin.expire(now_s)
        known = len(self._bulletin)
        self._copies = link_counts((notice.facts for notice in self._bulletin.notices()), "").copies
        interval_s = anti_entropy_interval_s(known, TIMING.anti_entropy_interval_s)
        self._traffic.repaired(known, interval_s, now_s, lasting_s)

    def _lost(self, member: Member) -> None:
        """Its neighbours tell of it, as many as it takes, and one that had not heard of the others."""
        if len(self._members) <= WITNESSES:
            return
        names = [one for one in self._members if one != member.peer_id][: WITNESSES + 1]
        for name in names:
            witness = self._members[name].volunteer.identity
            lost_tag = peer_tag(member.volunteer.identity.public_key)
            loss = PeerLoss(peer_tag(witness.public_key), lost_tag, self._sequence())
            record = sign_loss(loss, witness)
            self._traffic.flooded("losses", record, self.living, self._timeline.now_s, LOSS_COST_BITS)

    def _take_back(self, member: Member) -> None:
        if member.told is not None:
            state = replace(member.told, ttl_s=0)
            self._bulletin.put(Notice(member.volunteer.facts, state, self._timeline.now_s))

    def _flood_facts(self, volunteer: Volunteer, cost_bits: float) -> None:
        record = self._facts_record(volunteer)
        self._traffic.flooded("facts", record, self.living, self._timeline.now_s, cost_bits)

    def _watch(self, member: Member) -> Alarm:
        alarm = Alarm(self._timeline, lambda: self._ring(member))
        self._alarms[member.peer_id] = alarm
        self._members[member.peer_id] = member
        return alarm

    def _ring(self, member: Member) -> None:
        news_bits_per_s = self._traffic.news.after(self._timeline.now_s).bits_per_s
        self._tell(member, core.Look(len(self._bulletin), news_bits_per_s, self._draw(), self._copies))

    def _tell(self, member: Member, event: core.Event) -> None:
        if not member.alive:
            return
        for effect in member.speech.handle(event, self._timeline.now_s):
            if isinstance(effect, core.Wake):
                self._alarms[member.peer_id].move(effect.at_s)
            else:
                self._speak(member, effect)

    def _speak(self, member: Member, words: core.Speak) -> None:
        now_s, told = self._timeline.now_s, member.state()
        if words.facts is not None:  # a newcomer copies everybody's, too, which is once as much again
            self._flood_facts(member.volunteer, FACTS_COST_BITS / (1 if member.told is None else 2))
        state, record = self._sealed(member, told, words.ttl_s)
        self._traffic.flooded("states", record, self.living, now_s, STATE_COST_BITS)
        self._bulletin.put(Notice(member.volunteer.facts, state, now_s))
        member.told = told

    def _sealed(self, member: Member, told: PeerState, ttl_s: int) -> tuple[PeerState, bytes]:
        """The state as others read it, and its record."""
        state = replace(told, sequence=self._sequence(), facts_sequence=_CLOCK_MS, ttl_s=ttl_s)
        record = sign_state(state, member.volunteer.identity)
        return state_from_message(pb.State.FromString(record[_HEAD_BYTES:]), member.peer_id), record

    def _facts_record(self, volunteer: Volunteer) -> bytes:
        """With measured neighbours, and with measurements of its own: no two machines of a kind measure the same."""
        facts = volunteer.facts
        noise = iter(hashlib.shake_256(facts.public_key).digest(256))

        def measured(value: float) -> float:
            return value * (1 + _NOISE * ((next(noise) * 256 + next(noise)) / 32_768 - 1))

        count = min(_LINKS, announced_links(self.living), len(self._members))
        near = [one for one, _ in zip(self._members, range(count), strict=False)]
        noisy = replace(
            facts,
            sequence=self._sequence(),
            ttl_s=100_000,
            layer_latencies=tuple(
                replace(one, layer_ms=measured(one.layer_ms)) for one in facts.layer_latencies
            ),
            prefill_latencies=tuple(
                replace(one, layer_ms=measured(one.layer_ms)) for one in facts.prefill_latencies
            ),
            embed_ms=measured(facts.embed_ms),
            head_ms=measured(facts.head_ms),
            step_ms=measured(facts.step_ms),
            load_bytes_per_s=measured(facts.load_bytes_per_s),
            decode_context_ms=measured(facts.decode_context_ms),
            prefill_context_ms=measured(facts.prefill_context_ms),
            links=tuple(LinkMeasurement(peer_id, measured(30.0)) for peer_id in near),
        )
        return sign_facts(noisy, volunteer.identity)

    def _sequence(self) -> int:
        return _CLOCK_MS + int(1000 * self._timeline.now_s)

    def _draw(self) -> float:
        """Evenly from -1 to 1."""
        return float(self._rng.uniform(-1.0, 1.0))
