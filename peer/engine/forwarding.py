"""Frames out: what a step gives goes to the next hops, tokens to the heads, window updates back.

Prefill waits for two things before it is stepped: for the session's window at the next hop (`prefill_window`), and for
the frames to that hop that its link had no room for. Such frames wait here, at most those of two micro-batches: the one
that found the link full and the one that the engine had begun by then.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sessions import HopSession, SessionTable
from molink.peer.engine.steps import (
    OutgoingRows,
    StepInput,
    StepOutput,
    row_header,
    rows_by_frame,
    token_message,
)
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.spec import ModelSpec

Lost = Callable[[Sequence[StepInput], str, str], None]
"""Whose frames cannot go out, to which peer, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """Activations for one peer."""

    inputs: tuple[StepInput, ...]
    header: pb.Activations
    payload: memoryview
    traffic_class: TrafficClass
    due_s: float

    def post(self, link: Link) -> bool:
        sessions = tuple(one.session.key.session for one in self.inputs)
        return link.post(self.header, self.payload, self.traffic_class, sessions, self.due_s)


class Forwarder:
    """Owns the prefill windows and the frames that their link had no room for."""

    def __init__(
        self,
        spec: ModelSpec,
        sessions: SessionTable,
        links: Links,
        metrics: PeerMetrics,
        lost: Lost,
        opened: Callable[[], None],
    ) -> None:
        """`opened` is called when prefill that had to wait may be stepped."""
        self._spec = spec
        self._sessions = sessions
        self._links = links
        self._metrics = metrics
        self._lost = lost
        self._opened = opened
        self._send_window = SendWindow()
        self._receive_window = ReceiveWindow()
        self._held_frames: dict[str, deque[_Frame]] = {}
        """By peer id, in order, where some wait."""
        self._awaited_links: set[str] = set()
        """Peers whose link says when it has room."""

    # -- prefill windows

    def may_prefill(self, key: LeaseKey) -> bool:
        """Whether the session's next hop takes what another step of its prompt gives."""
        session = self._sessions.get(key.session, key.epoch)
        if session is None or session.is_tail:
            return True
        return session.next_peer_id not in self._held_frames and self._send_window.is_open(key)

    def admit_prefill(self, session: HopSession, step: int, count: int) -> bool:
        """A step of `count` rows of prefill has come from the previous hop; False: it does not keep to the window."""
        return self._receive_window.admit(session.key, step, count * self._spec.activation_bytes)

    def record_begun(self, inputs: Sequence[StepInput]) -> None:
        """The engine has these."""
        for one in inputs:
            if one.prefill and not one.session.is_tail:
                self._send_window.record_sent(
                    one.session.key, one.step, one.count * self._spec.activation_bytes
                )

    def send_window_updates(self, inputs: Sequence[StepInput]) -> None:
        """The engine has computed these: previous hops may send more, and are told when that is worth a frame."""
        told: dict[str, list[StepInput]] = {}
        for one in inputs:
            if one.prefill and self._receive_window.record_computed(one.session.key, one.step):
                told.setdefault(one.session.previous_peer_id, []).append(one)
        for peer_id, stepped in told.items():
            steps = [
                pb.SteppedTo(session=one.session.key.session, epoch=one.session.key.epoch, step=one.step)
                for one in stepped
            ]
            link = self._links.find(peer_id)
            sessions = tuple(one.session.key.session for one in stepped)
            if link is None or not link.post(pb.Stepped(sessions=steps), sessions=sessions):
                self._lost(stepped, peer_id, "no open link to the previous hop")

    def on_window_update(self, link: Link, header: pb.Stepped) -> None:
        """A next hop has computed prefill that went there."""
        for one in header.sessions:
            session = self._sessions.get(one.session, one.epoch)
            if session is not None and not session.is_tail and session.next_peer_id == link.peer_id:
                self._send_window.apply_window_update(session.key, one.step)
        self._opened()

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended: a frame that waits for it alone is dropped."""
        self._links.cancel(key.session)
        self._send_window.forget_session(key)
        self._receive_window.forget_session(key)
        for peer_id, frames in tuple(self._held_frames.items()):
            left = deque(frame for frame in frames if any(map(self._is_alive, frame.inputs)))
            if left:
                self._held_frames[peer_id] = left
            else:
                del self._held_frames[peer_id]

    def _is_alive(self, one: StepInput) -> bool:
        return self._sessions.get(one.session.key.session, one.session.key.epoch) is not None

    # -- activations

    def forward_activations(self, output: StepOutput) -> None:
        """To each next hop its rows in order. Where prompts go as they are due, each has a frame of its own."""
        frames: Iterable[OutgoingRows] = output.frames
        if output.hidden is not None:
            apart = self._links.uses_deadlines
            frames = rows_by_frame(output.inputs, output.hidden, prompts_apart=apart)
        for frame in frames:
            self._forward(frame.peer_id, self._frame(frame, output))

    def _frame(self, outgoing: OutgoingRows, output: StepOutput) -> _Frame:
        header = pb.Activations(hidden_size=self._spec.hidden_size, dtype=outgoing.encoding)
        header.rows.extend(row_header(one, self._timings(one, output)) for one in outgoing.inputs)
        payload = outgoing.payload
        self._metrics.sent_activations(outgoing.encoding, payload.nbytes)
        traffic_class = TrafficClass.PREFILL if outgoing.prefill else TrafficClass.DECODE
        due_s = outgoing.inputs[0].session.due_s if outgoing.prefill else 0.0
        return _Frame(outgoing.inputs, header, payload, traffic_class, due_s)

    def _forward(self, peer_id: str, frame: _Frame) -> None:
        prefill = frame.traffic_class is TrafficClass.PREFILL
        if prefill and peer_id in self._held_frames:
            self._held_frames[peer_id].append(frame)
            return
        link = self._links.find(peer_id)
        if link is None:
            self._lost(frame.inputs, peer_id, "no open link to the next hop")
        elif not frame.post(link):
            if prefill:
                self._held_frames[peer_id] = deque((frame,))
                self._await_room(peer_id, link)
            else:
                # decode has room of its own, and of each session only one step is on its way
                self._lost(frame.inputs, peer_id, "the link to the next hop is full of decode")

    def _await_room(self, peer_id: str, link: Link) -> None:
        if peer_id not in self._awaited_links:
            self._awaited_links.add(peer_id)
            link.when_room(lambda: self._has_room(peer_id))

    def _has_room(self, peer_id: str) -> None:
        """Something has left the link to that peer, or it is gone."""
        self._awaited_links.discard(peer_id)
        frames = self._held_frames.get(peer_id, deque())
        while frames:
            link = self._links.find(peer_id)
            if link is not None and not frames[0].post(link):
                self._await_room(peer_id, link)
                return
            frame = frames.popleft()
            if link is None:
                self._lost(frame.inputs, peer_id, "no open link to the next hop")
        self._held_frames.pop(peer_id, None)
        self._opened()

    # -- tokens

    def forward_tokens(self, output: StepOutput) -> list[tuple[HopSession, pb.Token]]:
        """One frame to each head elsewhere; returns the tokens whose head is here."""
        asked = [one for one in output.inputs if one.sample]
        by_head: dict[str, list[tuple[StepInput, pb.Token]]] = {}
        drawn_here: list[tuple[HopSession, pb.Token]] = []
        for one, drawn, position in zip(asked, output.sampled, output.positions, strict=True):
            key = one.session.key
            session = self._sessions.get(key.session, key.epoch)
            if session is None:
                continue
            token = token_message(one, drawn, position, self._timings(one, output))
            if session.is_head:
                drawn_here.append((session, token))
            else:
                by_head.setdefault(session.next_peer_id, []).append((one, token))
        for peer_id, drawn_tokens in by_head.items():
            link = self._links.find(peer_id)
            tokens = pb.Tokens(tokens=[token for _, token in drawn_tokens])
            sessions = tuple(one.session.key.session for one, _ in drawn_tokens)
            if link is None or not link.post(tokens, traffic_class=TrafficClass.DECODE, sessions=sessions):
                self._lost([one for one, _ in drawn_tokens], peer_id, "no open link to the head")
        return drawn_here

    def _timings(self, one: StepInput, output: StepOutput) -> tuple[pb.HopTiming, ...]:
        """What the hops so far took, this one included; nothing unless the session is traced."""
        if not one.session.plan.trace:
            return ()
        link = self._links.find(one.session.next_peer_id)
        timing = pb.HopTiming(
            queue_us=max(0, round((output.started_s - one.arrived_s) * 1e6)),
            compute_us=round(output.compute_s * 1e6),
            link_rtt_us=round(link.rtt_ms * 1000) if link is not None and link.rtt_ms is not None else 0,
        )
        return (*one.timings, timing)
