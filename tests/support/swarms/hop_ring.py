"""Hops of several circuits as their cores alone: engines, links and clocks that do what a test draws."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.swarms.pipelines import stage

from molink.peer.hop import events
from molink.peer.hop.frames import OutgoingFrame
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import DrawnToken, HopPlace, HopSession, HopSettings, HopStep
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.in_flight_rules import fixed
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.scheduling.trip_load import TripBegun, TripLoad
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.spec import Span

STAGE = stage(10.0, 0.1, link_ms=5.0)
CAPACITY = 10_000
LIMITS = BatchLimits()
LAYERS = 8


def session_of(
    number: int, circuit: Sequence[tuple[str, Span]], hop: int, prompt_tokens: int = 5, epoch: int = 1
) -> HopSession:
    """A session at one hop of its circuit."""
    place = HopPlace(tuple(circuit), hop, (STAGE,) * len(circuit), prompt_tokens, CAPACITY)
    return HopSession(LeaseKey(number.to_bytes(16), epoch), place)


def core_of(
    peer_id: str,
    limits: BatchLimits = LIMITS,
    *,
    chunk_tokens: int = 1000,
    micro_batches: int = 1,
    uses_deadlines: bool = False,
    sizer: SliceSizer | None = None,
    gathering: PromptGathering[HopSession] | None = None,
) -> HopCore[HopSession, Any]:
    """A core whose rows are of one byte."""
    settings = HopSettings(
        peer_id,
        1,
        limits.max_tokens,
        limits,
        fixed(micro_batches),
        equal_chunks(chunk_tokens),
        uses_deadlines,
    )
    return HopCore(settings, sizer, gathering)


@dataclass
class Generation:
    """One session along its circuit of peers."""

    number: int
    peers: list[int]
    prompt_tokens: int
    new_tokens: int
    sessions: list[HopSession] = field(default_factory=list)
    computed: list[list[tuple[int, int]]] = field(default_factory=list)
    """At each hop: steps and tokens, as the engine has computed them."""
    got: int = 0
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.got == self.new_tokens


@dataclass
class RingGuesser:
    """Guesses positions, of which some are wrong: these are the same below zero."""

    chance: Any
    """A Random."""
    trips: list[tuple[int, int]]
    """Of each: how many were guessed, and how many of these were right."""
    drafter: Any = None

    def record_trip(self, tokens: Sequence[tuple[int, ...]], guessed: int) -> None:
        assert len(tokens) <= guessed + 1
        self.trips.append((guessed, len(tokens) - 1))

    def rests(self) -> bool:
        return False

    def propose(self, last: tuple[int, ...], most: int, _: TripLoad) -> tuple[tuple[int, ...], TripBegun]:
        (position,) = last
        count = min(most, self.chance.randrange(4))
        guesses = [position + at for at in range(1, count + 1)]
        rows = (position, *(one if self.chance.random() < 0.7 else -one for one in guesses))
        return rows, TripBegun(count)


class HopRing:
    """Peers with a core each, and links that hold so many bytes of prefill."""

    chance: Any = None
    """A Random, if heads guess."""

    def __init__(
        self,
        generations: list[Generation],
        cores: list[HopCore[HopSession, Any]],
        window: tuple[int, int],
        link_bytes: int,
    ) -> None:
        self.generations = generations
        self.cores = cores
        self.window = window
        self.link_bytes = link_bytes
        self.now_s = 0.0
        self.engines: dict[int, events.HopEvent[HopSession, Any]] = {}
        """By peer: what its engine answers when it is done."""
        self.links: dict[tuple[int, int], deque[tuple[str, Any]]] = {}
        self.awaiting: set[tuple[int, int]] = set()
        self.wakes_s: dict[int, float] = {}
        self.failed: list[events.FailSession[HopSession]] = []
        self.trips: list[tuple[int, int]] = []
        for one in generations:
            for hop, peer in enumerate(one.peers):
                one.sessions.append(self.session(one, hop))
                one.computed.append([])
                self.tell(peer, events.SessionOpened(one.sessions[hop]))
            self.tell(one.peers[0], events.PromptExpected(one.sessions[0], one.prompt_tokens))

    def session(self, one: Generation, hop: int, epoch: int = 1) -> HopSession:
        """A session of the generation at one of its hops."""
        stops = [*range(1, len(one.peers)), LAYERS]
        circuit = [(f"{peer}", Span(hop, stops[hop])) for hop, peer in enumerate(one.peers)]
        session = session_of(one.number, circuit, hop, one.prompt_tokens, epoch)
        session.prefill.send_window = SendWindow(*self.window)
        session.prefill.receive_window = ReceiveWindow(*self.window)
        self._guess(session)
        return session

    def _guess(self, session: HopSession) -> None:
        if self.chance is not None and session.is_head:
            session.progress.guesser = RingGuesser(self.chance, self.trips)

    def start(self, one: Generation, position: int = 0) -> None:
        """The head gets what the generation has from that position on; the payload of each row is its position."""
        tokens = one.prompt_tokens + one.got - position
        self._guess(one.sessions[0])

        def positions(first: int, stop: int) -> tuple[int, ...]:
            return tuple(range(position + first, position + stop))

        self.tell(one.peers[0], events.PromptStarted(one.sessions[0], tokens, position, positions))

    def end(self, one: Generation) -> None:
        """The client releases it at all hops."""
        one.has_ended = True
        for peer, session in zip(one.peers, one.sessions, strict=True):
            self.tell(peer, events.SessionEnded(session))

    def turns(self) -> list[tuple[str, Any]]:
        """What may happen next."""
        turns: list[tuple[str, Any]] = [("compute", peer) for peer in self.engines]
        turns += [("carry", ends) for ends, link in self.links.items() if link]
        if not turns and self.wakes_s:
            turns = [("wake", min(self.wakes_s, key=lambda peer: self.wakes_s[peer]))]
        return turns

    def take(self, turn: tuple[str, Any]) -> None:
        """Lets it happen."""
        self.now_s += 0.001
        what, which = turn
        if what == "compute":
            self.tell(which, self.engines.pop(which))
        elif what == "carry":
            self._carry(which)
        else:
            self.now_s = max(self.now_s, self.wakes_s.pop(which))
            self.tell(which, events.Woken())

    def tell(self, peer: int, event: events.HopEvent[HopSession, Any]) -> None:
        for effect in self.cores[peer].handle(event, self.now_s):
            self._do(peer, effect)

    # -- what peers do

    def _do(self, peer: int, effect: events.HopEffect[HopSession, Any]) -> None:
        if isinstance(effect, events.ComputeBatch | events.ComputeSlice):
            assert peer not in self.engines, "the engine is busy"
            self.engines[peer] = self._answer(effect)
        elif isinstance(effect, events.ForwardRows | events.RetryHeld):
            self._forward(peer, effect)
        elif isinstance(effect, events.SendTokens):
            self._link(peer, effect.peer_id).append(("tokens", effect.tokens))
        elif isinstance(effect, events.SendGuesses):
            for session, step, _ in effect.steps:
                self._link(peer, effect.peer_id).append(("guesses", (session, step)))
        elif isinstance(effect, events.SendWindowUpdate):
            self._link(peer, effect.peer_id).append(("update", effect.stepped))
        else:
            self._note(peer, effect)

    def _note(self, peer: int, effect: events.HopEffect[HopSession, Any]) -> None:
        if isinstance(effect, events.AwaitRoom):
            self.awaiting.add((peer, int(effect.peer_id)))
        elif isinstance(effect, events.DeliverTokens):
            for token in effect.tokens:
                self.generation(token[0]).got += 1
        elif isinstance(effect, events.WakeAt):
            self.wakes_s[peer] = effect.at_s
        elif isinstance(effect, events.FailSession):
            self.failed.append(effect)

    def _forward(
        self, peer: int, effect: events.ForwardRows[HopSession, Any] | events.RetryHeld[HopSession, Any]
    ) -> None:
        refused: list[OutgoingFrame[HopSession, Any]] = []
        for frame in effect.frames:
            if (refused and frame.prefill) or not self._post(peer, frame):
                refused.append(frame)
        if isinstance(effect, events.RetryHeld):
            self.tell(peer, events.HeldRetried(effect.peer_id, len(effect.frames) - len(refused)))
        elif refused:
            self.tell(peer, events.FramesRefused(effect.peer_id, refused))

    def _answer(
        self, effect: events.ComputeBatch[HopSession, Any] | events.ComputeSlice[HopSession, Any]
    ) -> events.HopEvent[HopSession, Any]:
        if isinstance(effect, events.ComputeBatch):
            return self._computed(effect.steps)
        through, left, layers_left = effect.slice_.advanced()
        whole = self._computed(through) if through else None
        return events.SliceComputed(effect.slice_, whole, left, layers_left, 0.01, is_complete=True)

    def generation(self, session: HopSession) -> Generation:
        return self.generations[int.from_bytes(session.key.session)]

    def _computed(self, steps: Sequence[HopStep[HopSession, Any]]) -> events.BatchComputed[HopSession, Any]:
        tokens: list[DrawnToken[HopSession, Any]] = []
        for one in steps:
            generation = self.generation(one.session)
            generation.computed[one.session.place.hop].append((one.step, one.tokens))
            if one.session.is_tail and one.draws:
                tokens += self._drawn(one, generation.prompt_tokens + generation.new_tokens - 1)
        return events.BatchComputed(steps, tokens=tokens)

    def _drawn(self, one: HopStep[HopSession, Any], last_position: int) -> list[DrawnToken[HopSession, Any]]:
        """The tail draws the next position, and one more behind each guess that was that, as far as it knows them."""
        position, guesses = one.position + one.tokens - one.guesses, one.payload[one.tokens - one.guesses :]
        tokens: list[DrawnToken[HopSession, Any]] = []
        while True:
            is_last = position == last_position
            tokens.append((one.session, one.step, position, is_last, (position,), None))
            knows = one.session.is_head or one.session.progress.told_guesses[0] == one.step
            if is_last or not knows or not guesses or guesses[0] != position:
                return tokens
            position, guesses = position + 1, guesses[1:]

    def _link(self, peer: int, other: str) -> deque[tuple[str, Any]]:
        return self.links.setdefault((peer, int(other)), deque())

    def _post(self, peer: int, frame: OutgoingFrame[HopSession, Any]) -> bool:
        link = self._link(peer, frame.peer_id)
        if frame.prefill:
            queued = [one for what, one in link if what == "rows" and one.prefill]
            size = sum(step.tokens for one in [*queued, frame] for step in one.steps)
            if queued and size > self.link_bytes:
                return False
        link.append(("rows", frame))
        return True

    def _carry(self, ends: tuple[int, int]) -> None:
        """A link brings a message, and has room again."""
        sender, receiver = ends
        what, message = self.links[ends].popleft()
        if what == "rows":
            rows = [
                (there, one.step, one.tokens, one.draws, one.prefill, one.position, one.payload)
                for one in message.steps
                if (there := self._there(one.session, receiver)) is not None
            ]
            self.tell(receiver, events.RowsArrived(f"{sender}", rows))
        elif what == "tokens":
            tokens = [
                (there, *token[1:])
                for token in message
                if (there := self._there(token[0], receiver)) is not None
            ]
            self.tell(receiver, events.TokensReturned(f"{sender}", tokens))
        elif what == "guesses":
            if (there := self._there(message[0], receiver)) is not None:
                there.progress.told_guesses = message[1], ()
        else:
            stepped = [
                (there, step)
                for session, step in message
                if (there := self._there(session, receiver)) is not None
            ]
            self.tell(receiver, events.WindowUpdated(f"{sender}", stepped))
        if ends in self.awaiting:
            self.awaiting.remove(ends)
            self.tell(sender, events.LinkHasRoom(f"{receiver}"))

    def _there(self, session: HopSession, peer: int) -> HopSession | None:
        """The same session at that peer, if it is in the same epoch."""
        generation = self.generation(session)
        there = generation.sessions[generation.peers.index(peer)]
        return there if there.key == session.key else None
