"""Frames out: what the hop's core has sent, as protobuf messages on links."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from molink.peer.engine.guessing import tell_sources
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.steps import StepFrame, StepInput, StepOutput, StepPayload, row_header, rows_of
from molink.peer.hop.session import Credit, DrawnToken, GuessedStep
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import MAX_HEADER_BYTES
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards import codec
from molink.shards.spec import ModelSpec

StepToken = DrawnToken[ServedSession, StepPayload]
_TOKEN_FIELD_BYTES = 8
"""Of each token in its message, beside its own: a tag and a length, at most."""


@dataclass(frozen=True, slots=True)
class FrameRows:
    """What a frame is made of until it is sent for the first time."""

    output: StepOutput
    encoded: torch.Tensor | None
    """Its rows as they go out; None: they are encoded then."""


@dataclass(frozen=True, slots=True)
class _Message:
    header: pb.Activations
    payload: memoryview


class FrameSender:
    """Sends what steps gave. Owns nothing: what a link has no room for is the core's to hold."""

    def __init__(self, spec: ModelSpec, links: Links, metrics: PeerMetrics) -> None:
        self._spec = spec
        self._links = links
        self._metrics = metrics

    def post_frames(self, link: Link, frames: Sequence[StepFrame], *, stops: bool = False) -> list[StepFrame]:
        """Posts frames in order; returns those for which there is no room: all prefill behind prefill that was refused,
        or with `stops` all frames."""
        refused: list[StepFrame] = []
        for frame in frames:
            holds_up = bool(refused) and (stops or (frame.prefill and refused[-1].prefill))
            if holds_up or not self._post(link, frame):
                refused.append(frame)
        return refused

    def send_tokens(self, peer_id: str, tokens: Sequence[StepToken]) -> bool:
        """To a head elsewhere; False: there is no open link."""
        link = self._links.find(peer_id)
        return link is not None and all(
            link.post(
                message,
                traffic_class=TrafficClass.DECODE,
                sessions=tuple([token.session for token in message.tokens]),
            )
            for message in _messages_of([token[5] for token in tokens])
        )

    def send_guesses(self, peer_id: str, steps: Sequence[GuessedStep[ServedSession, StepPayload]]) -> None:
        """Tells sessions' tail in one frame what was guessed for these steps. Without an open link it draws one token
        of each."""
        if (link := self._links.find(peer_id)) is None:
            return
        guesses = [
            pb.Guess(
                session=session.key.session,
                epoch=session.key.epoch,
                step=step,
                token_ids=(payload.token_ids or ())[1:],
            )
            for session, step, payload in steps
        ]
        sessions = tuple([session.key.session for session, _, _ in steps])
        link.post(pb.Guesses(guesses=guesses), traffic_class=TrafficClass.DECODE, sessions=sessions)

    def send_window_update(self, peer_id: str, stepped: Sequence[Credit[ServedSession]]) -> bool:
        """Tells a previous hop what has been computed here; False: there is no open link."""
        link = self._links.find(peer_id)
        steps = [
            pb.SteppedTo(session=session.key.session, epoch=session.key.epoch, step=step)
            for session, step in stepped
        ]
        sessions = tuple(session.key.session for session, _ in stepped)
        return link is not None and link.post(pb.Stepped(sessions=steps), sessions=sessions)

    def deliver_tokens(self, tokens: Iterable[StepToken]) -> None:
        """To each client its sessions' tokens. A client that is gone gets none: its lease runs out."""
        by_client: dict[Link, list[pb.Token]] = {}
        for token in tokens:
            owner = token[0].owner
            token[5].ClearField("expected")  # the head's alone
            tell_sources(token[0], token[5])
            if owner.closed_because is None:
                by_client.setdefault(owner, []).append(token[5])
        for owner, own in by_client.items():
            if not all(
                owner.post(message, traffic_class=TrafficClass.DECODE) for message in _messages_of(own)
            ):
                owner.close("it does not take the tokens that it asked for")

    def timings(self, one: StepInput, output: StepOutput) -> tuple[pb.HopTiming, ...]:
        """What the hops so far took, this one included; nothing unless the session is traced."""
        if not one.session.plan.trace:
            return ()
        link = self._links.find(one.session.next_peer_id)
        timing = pb.HopTiming(
            queue_us=max(0, round((output.started_s - one.arrived_s) * 1e6)),
            compute_us=round(output.compute_s * 1e6),
            link_rtt_us=round(link.rtt_ms * 1000) if link is not None and link.rtt_ms is not None else 0,
        )
        if self._metrics.traces is not None:
            self._metrics.traces.record_step(one.session, timing)
        return (*one.payload.timings, timing)

    def _post(self, link: Link, frame: StepFrame) -> bool:
        message = self._message(frame)
        sessions = tuple([one.session.key.session for one in frame.steps])
        is_bulk = frame.prefill and not frame.is_short
        traffic_class = TrafficClass.PREFILL if is_bulk else TrafficClass.DECODE
        return link.post(message.header, message.payload, traffic_class, sessions, frame.due_s)

    def _message(self, frame: StepFrame) -> _Message:
        """The frame's message, made once."""
        if isinstance(frame.output, FrameRows):
            output, encoded = frame.output.output, frame.output.encoded
            header = pb.Activations(hidden_size=self._spec.hidden_size, dtype=frame.encoding)
            header.rows.extend(row_header(one, self.timings(one, output)) for one in frame.steps)
            if encoded is not None:
                payload = codec.bytes_of(encoded)
            elif output.hidden is not None:
                payload = codec.encode(rows_of(frame, output.hidden), frame.encoding)
            else:
                raise ValueError("a frame has no rows")
            self._metrics.sent_activations(frame.encoding, payload.nbytes)
            frame.output = _Message(header, payload)
        if not isinstance(frame.output, _Message):
            raise TypeError(f"a frame of activations cannot be made of {type(frame.output).__name__}")
        return frame.output


def _messages_of(tokens: Iterable[pb.Token]) -> Iterator[pb.Tokens]:
    """One message where they fit into it: prompts' log-probabilities may be half of one. What a step gave stays
    together."""
    message, size_bytes = pb.Tokens(), 0
    for _, step in groupby(tokens, lambda token: (token.session, token.epoch, token.step)):
        together = tuple(step)
        step_bytes = sum(_TOKEN_FIELD_BYTES + token.ByteSize() for token in together)
        if size_bytes and size_bytes + step_bytes > MAX_HEADER_BYTES:
            yield message
            message, size_bytes = pb.Tokens(), 0
        message.tokens.extend(together)
        size_bytes += step_bytes
    yield message
