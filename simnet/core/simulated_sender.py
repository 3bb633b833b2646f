"""Sender of a simulated hop: puts on its links what its core says is to be sent, and says what finds no room."""

from collections.abc import Callable, Sequence
from functools import partial

from molink.peer.hop import events
from molink.peer.hop.frames import OutgoingFrame
from molink.peer.hop.session import HopPlace, HopSession
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_forecast import DecodeForecast
from molink.peer.wire.transmission.classes import TrafficClass
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import SimulatedFrame, activations_bytes, guesses_bytes, small_frame_bytes
from molink.simnet.core.request_load import Request


class SimulatedSession(HopSession):
    """A generation at one hop."""

    def __init__(self, key: LeaseKey, place: HopPlace, request: Request) -> None:
        super().__init__(key, place)
        self.request = request
        self.last_position = request.prompt_tokens + request.new_tokens - 1
        """Of a token that is drawn, in the sequence."""
        self.after = self.before = self
        """The same generation at the next hop, and at the previous one."""

    @property
    def right_guesses(self) -> int:
        """At the tail: how many of the guesses that have come with a step it draws itself."""
        guesser = self.after.progress.guesser
        return 0 if guesser is None else int(guesser.right)

    @property
    def drafted_s(self) -> float:
        """At the head: what guessing for a trip takes before it begins."""
        guesser = self.progress.guesser
        return 0.0 if guesser is None else float(guesser.drafted_s)


_PREFILL, _DECODE = TrafficClass.PREFILL, TrafficClass.DECODE
"""By its name, an enumeration finds a member by a call."""
Event = events.HopEvent[SimulatedSession, None]


class SimulatedSender:
    """Owner of a hop's links. `handle` takes what its core is to hear of them."""

    def __init__(
        self, peer_id: str, activation_bytes: int, channels: Channels, handle: Callable[[Event], None]
    ) -> None:
        self.links: dict[str, int] = {}
        """Their numbers, by who is at the other end."""
        self._peer_id = peer_id
        self._activation_bytes = activation_bytes
        self._channels = channels
        self._handle = handle
        self._awaits_room = False
        self._watch = DecodeForecast(self._expect, clock=float)

    def forward(self, effect: events.ForwardRows[SimulatedSession, None]) -> None:
        """What finds no room comes back, and prefill behind other prefill that waits: the core may have sent it on
        before that was refused."""
        refused: list[OutgoingFrame[SimulatedSession, None]] = []
        for frame in effect.frames:
            waits = frame.prefill and (self._awaits_room or refused)
            if waits or not self._post(frame):
                refused.append(frame)
        if refused:
            self._handle(events.FramesRefused(effect.peer_id, refused))

    def retry(self, effect: events.RetryHeld[SimulatedSession, None]) -> None:
        """What was held is tried again, in order, until the link is full."""
        self._awaits_room = False
        posted = 0
        for frame in effect.frames:
            if not self._post(frame):
                break
            posted += 1
        self._handle(events.HeldRetried(effect.peer_id, posted))

    def await_room(self, effect: events.AwaitRoom) -> None:
        """The core hears when the link has room."""
        self._awaits_room = True
        self._channels.when_room(partial(self._handle, events.LinkHasRoom(effect.peer_id)))

    def _post(self, frame: OutgoingFrame[SimulatedSession, None]) -> bool:
        steps = frame.steps
        prefill, tokens = frame.prefill, sum([one.tokens for one in steps])
        is_bulk = prefill and not frame.is_short
        traffic_class, due_s = (_PREFILL, frame.due_s) if is_bulk else (_DECODE, 0.0)
        rows = [
            (one.session.after, one.step, one.tokens, one.draws, prefill, one.position, None) for one in steps
        ]
        size_bytes = activations_bytes(len(steps), tokens, self._activation_bytes)
        whose = tuple([one.session.key.session for one in steps])
        arrives = events.RowsArrived(self._peer_id, rows)
        return self._channels.post(
            self.links[frame.peer_id], SimulatedFrame(traffic_class, size_bytes, whose, arrives, due_s)
        )

    def send_tokens(self, effect: events.SendTokens[SimulatedSession, None]) -> None:
        """Drawn tokens go back to the head."""
        tokens = [(token[0].after, *token[1:]) for token in effect.tokens]
        arrives = events.TokensReturned(self._peer_id, tokens)
        self._send(effect.peer_id, _DECODE, [token[0] for token in tokens], arrives)

    def send_guesses(self, effect: events.SendGuesses[SimulatedSession, None]) -> None:
        """The tail hears of guesses, which are nothing here but bytes."""
        whose = tuple([session.key.session for session, _, _ in effect.steps])
        nothing: Event = events.RowsArrived(self._peer_id, ())
        size_bytes = guesses_bytes([session.progress.guesses for session, _, _ in effect.steps])
        frame = SimulatedFrame(_DECODE, size_bytes, whose, nothing)
        if not self._channels.post(self.links[effect.peer_id], frame):
            raise OverflowError(f"the link from hop {self._peer_id} is full of decode")

    def send_window_update(self, effect: events.SendWindowUpdate[SimulatedSession]) -> None:
        """The previous hop hears what it may send."""
        stepped = [(session.before, step) for session, step in effect.stepped]
        arrives = events.WindowUpdated(self._peer_id, stepped)
        self._send(effect.peer_id, TrafficClass.CONTROL, [session for session, _ in stepped], arrives)

    def _send(
        self, peer_id: str, traffic_class: TrafficClass, sessions: Sequence[SimulatedSession], content: Event
    ) -> None:
        size_bytes = small_frame_bytes(len(sessions))
        whose = tuple([session.key.session for session in sessions])
        frame = SimulatedFrame(traffic_class, size_bytes, whose, content)
        if not self._channels.post(self.links[peer_id], frame):
            raise OverflowError(f"the link from hop {self._peer_id} is full of decode")

    def expect_decode(self, effect: events.ExpectDecode) -> None:
        """The uplink is told when decode will come to it."""
        if not self.links:
            return
        if effect.computing is not None:
            self._watch.computing(effect.computing)
        elif effect.first is not None:
            self._watch.awaiting(effect.first)

    def _expect(self, peer_id: str, at_s: float) -> None:
        self._channels.expect_decode(self.links[peer_id], at_s)
