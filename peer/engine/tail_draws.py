"""When a tail can draw the next token of sessions whose draws depend on the tokens before. On the event loop."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from molink.dht.refusals import RefusalLog
from molink.peer.engine.sessions import ServedSession
from molink.peer.masks.mask_worker import MaskOrder, MaskWorker, NextMask
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

_log = logging.getLogger(__name__)


class TailDraws:
    """Keeper of what is known for such draws. It says up to which position tokens of a session can be drawn."""

    def __init__(
        self,
        allow: Callable[[ServedSession, int], None],
        fail: Callable[[ServedSession, str, str, str], None],
    ) -> None:
        """`allow` hears up to which position the session's tokens can be drawn now; `fail` which session cannot go on,
        by whose fault, under which code and why."""
        self._allow = allow
        self._fail = fail
        self._refusals = RefusalLog(_log)
        self.masks: MaskWorker | None = None
        """Who computes what grammars allow; None: nobody does here."""

    def on_history(self, session: ServedSession | None, link: Link, history: pb.History) -> None:
        """The client tells the tail what the sequence is so far.

        Raises:
            ProtocolError: it is not the client's to say, or cannot be the session's sequence.
        """
        if session is None or session.ended:
            return
        if session.owner is not link or session.drawing is None:
            raise ProtocolError("a history is told by the session's client, to a tail that asks for it")
        tokens, plan = tuple(history.token_ids), session.plan
        if not tokens or history.position + len(tokens) > plan.capacity_tokens:
            raise ProtocolError(f"a history of {len(tokens)} tokens does not fit the session")
        if max(tokens) >= plan.vocabulary:
            raise ProtocolError(f"token {max(tokens)} is beyond the vocabulary of {plan.vocabulary}")
        self.learn(session, history.position, tokens)

    def drew(self, session: ServedSession, position: int, token_id: int) -> None:
        """That token was drawn here."""
        if session.drawing is not None and token_id not in session.plan.params.stop_token_ids:
            self.learn(session, position, (token_id,))

    def learn(self, session: ServedSession, position: int, tokens: Sequence[int]) -> None:
        """The sequence has these tokens from that position on."""
        drawing = session.drawing
        if drawing is None or not drawing.learn(position, tokens):
            return
        if drawing.grammar is None:
            self._allow(session, drawing.known)
        elif drawing.is_prompt_known and not drawing.grammar.is_computing:
            self._compute_mask(session)

    def _compute_mask(self, session: ServedSession) -> None:
        """What may come next is computed while the token goes round."""
        drawing = session.drawing
        if drawing is None or drawing.grammar is None or self.masks is None:
            return
        drawing.grammar.is_computing = True
        done = partial(self._mask_computed, session)
        self.masks.begin(MaskOrder(drawing.grammar, drawing.known, drawing.generated_behind, done))

    def _mask_computed(self, session: ServedSession, found: NextMask | Exception) -> None:
        drawing = session.drawing
        if session.ended or drawing is None or drawing.grammar is None:
            return
        state = drawing.grammar
        state.is_computing = False
        if isinstance(found, Exception):
            self._refusals.refused("grammars that cannot be followed", session.owner.peer_id)
            own = session.plan.hops[session.place.hop].peer_id
            self._fail(session, own, "grammar", str(found))
            return
        state.next = found
        if found.position == drawing.known:
            self._allow(session, found.position)
        else:
            self._compute_mask(session)
