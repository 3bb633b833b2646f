"""When a tail can draw the next token of sessions whose draws depend on the tokens before. On the event loop."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from molink.dht.refusals import RefusalLog
from molink.peer.engine.sessions import ServedSession
from molink.peer.hop.speculation import MOST_GUESSES
from molink.peer.masks.mask_worker import MaskOrder, MaskWorker, NextMask
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

HELD_FROM = 0.2
"""Of tokens that are expected behind one, on average, from which on a token waits for them: a millisecond, where each
saves a trip or a step."""
MOST_UNHEEDED = 8
"""After so many tokens in a row with which expected ones went, and no guesses came, the head makes none."""
EXPECTS_WEIGHT = 0.1
"""Of the latest in the average."""
_log = logging.getLogger(__name__)


class TailDraws:
    """Keeper of what is known for such draws. It says up to which position tokens of a session can be drawn."""

    def __init__(
        self,
        allow: Callable[[ServedSession, int], None],
        fail: Callable[[ServedSession, str, str, str], None],
        hand_over: Callable[[ServedSession, Sequence[pb.Token]], None],
    ) -> None:
        """`allow` hears up to which position the session's tokens can be drawn now; `fail` which session cannot go on,
        by whose fault, under which code and why; `hand_over` takes tokens of a session that have waited here."""
        self._allow = allow
        self._fail = fail
        self._hand_over = hand_over
        self._held: dict[ServedSession, Sequence[pb.Token]] = {}
        """The tokens of a step that wait for what is expected behind them."""
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

    def drew(self, session: ServedSession, tokens: Sequence[pb.Token]) -> None:
        """These were drawn here in one step."""
        if session.drawing is not None:
            stops = session.plan.params.stop_token_ids
            drawn = [token.token_id for token in tokens if token.token_id not in stops]
            if drawn:
                self.learn(session, tokens[0].position, drawn, is_drawn=True)

    def hold(self, session: ServedSession, tokens: Sequence[pb.Token]) -> bool:
        """Whether these, which `drew` has heard of, wait here until it is known what may come behind them: what the
        grammar expects then goes with them, and may be guessed."""
        drawing = session.drawing
        if drawing is None or drawing.grammar is None or not session.plan.speculates:
            return False
        state = drawing.grammar
        if tokens[0].guessed:
            state.unheeded = 0
        waits = state.is_computing and state.expects >= HELD_FROM and state.unheeded < MOST_UNHEEDED
        if waits and tokens[-1].finish == pb.NOT_FINISHED:
            self._held[session] = tokens
            return True
        return False

    def learn(
        self, session: ServedSession, position: int, tokens: Sequence[int], *, is_drawn: bool = False
    ) -> None:
        """The sequence has these tokens from that position on: they were drawn here, or the client says so."""
        drawing = session.drawing
        if drawing is None or not drawing.learn(position, tokens, is_drawn=is_drawn):
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
        most = MOST_GUESSES if session.plan.speculates else 0
        self.masks.begin(MaskOrder(drawing.grammar, drawing.known, drawing.generated_behind, done, most))

    def _mask_computed(self, session: ServedSession, found: NextMask | Exception) -> None:
        drawing, held = session.drawing, self._held.pop(session, None)
        if session.ended or drawing is None or drawing.grammar is None:
            return
        state = drawing.grammar
        state.is_computing = False
        if isinstance(found, Exception):
            if held is not None:
                self._hand_over(session, held)
            self._refusals.refused("grammars that cannot be followed", session.owner.peer_id)
            own = session.plan.hops[session.place.hop].peer_id
            self._fail(session, own, "grammar", str(found))
            return
        state.next = found
        state.expects += EXPECTS_WEIGHT * (len(found.expected) - state.expects)
        if found.position == drawing.known:
            self._allow(session, found.position)
        else:
            self._compute_mask(session)
        if held is not None:
            if found.position == held[-1].position + 1:
                held[-1].expected.extend(found.expected)
                state.unheeded += bool(found.expected)
            self._hand_over(session, held)
