"""When a tail can draw the next token of sessions whose draws depend on the tokens before. On the event loop."""

from collections.abc import Callable, Sequence

from molink.peer.engine.sessions import ServedSession
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError


class TailDraws:
    """Keeper of what is known for such draws. It says up to which position tokens of a session can be drawn."""

    def __init__(self, allow: Callable[[ServedSession, int], None]) -> None:
        """`allow` hears up to which position the session's tokens can be drawn now."""
        self._allow = allow

    def on_history(self, session: ServedSession | None, link: Link, history: pb.History) -> None:
        """The client tells the tail what the sequence is so far.

        Raises:
            ProtocolError: it is not the client's to say, or cannot be the session's sequence.
        """
        if session is None or session.ended:
            return
        if session.owner is not link or session.drawing is None:
            raise ProtocolError("a history is told by the session's client, to a tail that asks for it")
        tokens = tuple(history.token_ids)
        if not tokens or history.position + len(tokens) > session.plan.capacity_tokens:
            raise ProtocolError(f"a history of {len(tokens)} tokens does not fit the session")
        if max(tokens) >= session.plan.vocabulary:
            raise ProtocolError(f"token {max(tokens)} is beyond the vocabulary of {session.plan.vocabulary}")
        self.learn(session, history.position, tokens)

    def drew(self, session: ServedSession, position: int, token_id: int) -> None:
        """That token was drawn here."""
        self.learn(session, position, (token_id,))

    def learn(self, session: ServedSession, position: int, tokens: Sequence[int]) -> None:
        """The sequence has these tokens from that position on."""
        drawing = session.drawing
        if drawing is not None and drawing.learn(position, tokens):
            self._allow(session, drawing.draws_to)
