"""Epochs that this peer is told of while the one before decodes: each begins here with its first rows.

The client names the next circuit to all of its hops, and these dial each other. When all are ready, the head of the
epoch that runs is told to end it with its next token, and that token is the first step of the next one. Nothing of a
session is being computed then, so that each hop changes over as its first rows come: its cache goes on as it is. A
standby waits for what its copy lacks, which is on its way. What does not come in time has the client ask for another
epoch, as after a loss.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from molink.peer.engine.guessing import MOST_PREDICTION_TOKENS
from molink.peer.engine.kept_copy import KeptCopy
from molink.peer.engine.sessions import ServedSession, SessionPlan, SessionTable
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import LeaseKey
from molink.peer.serving.admission import Admission
from molink.peer.serving.copying import Copying
from molink.peer.serving.neighbours import NeighbourLinks
from molink.peer.serving.request_limits import RequestRefused
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.shards.spec import MOST_GUESSED_TOKENS

MOST_FRAMES = 4
"""Of one session that wait: of one that decodes a single step is on its way."""
LOOK_EVERY_S = 0.02
BEGIN_EVERY_S = 0.001
"""Looks at a copy that the first rows wait for."""


@dataclass(slots=True, eq=False)
class PreparedEpoch:
    """An epoch of one session that has not begun here."""

    plan: SessionPlan
    hop: int
    owner: Link
    """The client's link."""
    expires_s: float
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What is done as soon as it has begun."""
    beginning: asyncio.Task[None] | None = None
    histories: list[pb.History] = field(default_factory=list)
    """At the tail: what the client has told of the sequence."""
    history_tokens: int = 0
    """Of these, with what they predict: nothing else bounds the memory that they take."""

    @property
    def key(self) -> LeaseKey:
        return self.plan.key

    @property
    def previous_peer_id(self) -> str:
        return self.plan.hops[self.hop - 1].peer_id

    def fail(self, peer_id: str, detail: str) -> None:
        """Tells the client that the epoch cannot begin at this peer."""
        span, key = self.plan.span_of(self.hop), self.key
        self.owner.post(
            pb.Failed(
                session=key.session,
                epoch=key.epoch,
                peer_id=peer_id,
                start=span.start,
                stop=span.stop,
                code="move",
                detail=detail[:500],
            )
        )


class PreparedEpochs:
    """Owner of the epochs that this peer was told of and that have not begun, one of each session.

    On the event loop.
    """

    def __init__(
        self,
        peer_id: str,
        sessions: SessionTable,
        admission: Admission,
        stepper: Stepper,
        neighbours: NeighbourLinks,
        links: Links,
        copying: Copying | None = None,
    ) -> None:
        """Without `copying` this peer is nobody's standby."""
        self._timeouts = admission.timeouts
        self._peer_id = peer_id
        self._sessions = sessions
        self._admission = admission
        self._stepper = stepper
        self._neighbours = neighbours
        self._links = links
        self._copying = copying
        self._prepared: dict[bytes, PreparedEpoch] = {}
        self._moves: dict[LeaseKey, pb.Move] = {}
        """Of sessions whose head is here: what their clients have asked for."""
        stepper.tell_moves(self._epoch_over)

    def __len__(self) -> int:
        return len(self._prepared)

    async def prepare(self, link: Link, plan: SessionPlan, hop: int, wait_s: float) -> pb.Readiness:
        """Takes note of the epoch, and returns whether it could begin: links are there, and what a copy lacks is on its
        way.

        Raises:
            RequestRefused: nothing of the session is here, its cache would not do, or a neighbour is not reached.
        """
        if not 0 <= hop < len(plan.hops) or plan.hops[hop].peer_id != self._peer_id:
            raise RequestRefused("request", f"hop {hop} of this circuit is not this peer's")
        self._require_cache(link, plan, hop)
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        self.forget_ended()
        known = self._prepared.get(plan.key.session)
        if known is None or known.key != plan.key:
            self._drop(known)
            known = PreparedEpoch(plan, hop, link, clock() + self._timeouts.prepared_s)
            self._prepared[plan.key.session] = known
        if (copy := self._copy(plan.key.session)) is not None and self._copying is not None:
            copy.is_awaited = True
            self._copying.keeper.writer.wake()  # what has come waits for no other tokens any more
        try:
            neighbours = plan.neighbours_of(hop)
            await asyncio.gather(*(self._neighbours.link(facts, link.remote) for facts in neighbours))
        except LinkError as error:
            self.forget(plan.key, link.peer_id)
            raise RequestRefused("link", error.reason, peer_id=error.peer_id) from error
        lacking = _lacking_tokens(self._copy(plan.key.session))
        # what a step brings at most: it comes while the last one goes round
        most_lacking = 1 + MOST_GUESSED_TOKENS if plan.speculates else 1
        while lacking > most_lacking and clock() < until_s:
            await asyncio.sleep(LOOK_EVERY_S)
            lacking = _lacking_tokens(self._copy(plan.key.session))
        if self._prepared.get(plan.key.session) is not known:
            raise RequestRefused("epoch", "another epoch has taken the place of this one")
        self._require_cache(link, plan, hop)
        copy = self._copy(plan.key.session)
        held_tokens = 0 if copy is None else copy.intake.kept_tokens
        return pb.Readiness(ready=lacking <= most_lacking, held_tokens=held_tokens)

    def knows(self, key: LeaseKey, asker: str) -> bool:
        """Whether that client has prepared this epoch here, and it has not begun."""
        known = self._prepared.get(key.session)
        return known is not None and known.key == key and known.owner.peer_id == asker

    def forget(self, key: LeaseKey, asker: str) -> bool:
        """The client gives the epoch up; whether it was known here."""
        if not self.knows(key, asker):
            return False
        self._drop(self._prepared.pop(key.session))
        return True

    def on_activations(self, link: Link, frame: Frame, header: pb.Activations) -> None:
        """Rows came. Those of an epoch that was prepared begin it, and are told to the stepper again when it has begun,
        without what else is in their frame: that may be of another session whose epoch is not yet ready."""
        if not self._prepared:
            return
        for row in header.rows:
            known = self._prepared.get(row.session)
            if known is None or known.key.epoch != row.epoch or known.previous_peer_id != link.peer_id:
                continue
            if known.hop > 0 and len(known.waiting) < MOST_FRAMES:
                alone = _alone(header, known.key)
                known.waiting.append(partial(self._stepper.on_activations, link, frame, alone))
                self._begin(known, row.position)

    def on_guesses(self, link: Link, header: pb.Guesses) -> None:
        """A head tells guesses. Those of an epoch that has not begun at its tail here come before its first rows: the
        stepper hears them as soon as it has."""
        for guess in header.guesses if self._prepared else ():
            known = self._prepared.get(guess.session)
            if known is None or known.key.epoch != guess.epoch or known.hop != len(known.plan.hops) - 1:
                continue
            if known.plan.hops[0].peer_id == link.peer_id and len(known.waiting) < MOST_FRAMES:
                told = pb.Guesses(guesses=[guess])
                known.waiting.append(partial(self._stepper.on_guesses, link, told))

    def on_history(self, link: Link, history: pb.History) -> None:
        """The client tells the tail what the sequence is. If the epoch has not begun the stepper hears it as soon as it
        has.

        Raises:
            ProtocolError: it is not the sender's to say, or more than there is to say of one session.
        """
        known = self._prepared.get(history.session)
        if known is None or known.key.epoch != history.epoch or known.owner is not link:
            self._stepper.on_history(link, history)
            return
        self._stepper.guessing.check_history(history)
        known.history_tokens += len(history.token_ids) + len(history.prediction)
        if (
            not history.token_ids
            or known.history_tokens > 2 * known.plan.capacity_tokens + MOST_PREDICTION_TOKENS
        ):
            raise ProtocolError("a history has the tokens of its session, each once, and one prediction")
        known.histories.append(history)

    def on_move(self, link: Link, move: pb.Move) -> None:
        """The client of a session whose head is here has it go on in its next epoch; or the head that was hands over
        the token with which it goes on here.

        Raises:
            ProtocolError: it is neither's to say.
        """
        if move.position:
            known = self._prepared.get(move.session)
            if known is not None and known.key.epoch == move.next_epoch and known.hop == 0:
                if self._left_head(move) != link.peer_id:
                    raise ProtocolError("a session moves by the word of its head alone")
                self._go_on(known, move.position, move.token_id)
            return
        session = self._sessions.get(move.session, move.epoch)
        if session is None or session.ended:
            return
        if session.owner is not link or not session.is_head or move.next_epoch <= move.epoch:
            raise ProtocolError("a move is asked for by the session's client, of its head, to a later epoch")
        self._moves[session.key] = move
        self._stepper.move_session(session)

    def forget_ended(self) -> None:
        """Forgets epochs whose session or client is gone, and those that have not begun in time. A client that comes
        back goes on in a later one. To be called now and then, since nothing comes of a client that is silent."""
        now_s = asyncio.get_running_loop().time()
        for session, known in tuple(self._prepared.items()):
            is_gone = self._sessions.find(session) is None and self._copy(session) is None
            if is_gone or known.owner.closed_because is not None or known.expires_s <= now_s:
                self._drop(self._prepared.pop(session))
        for key in [key for key in self._moves if self._sessions.get(*key) is None]:
            del self._moves[key]

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [one.beginning for one in self._prepared.values() if one.beginning is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require_cache(self, link: Link, plan: SessionPlan, hop: int) -> None:
        """Raises RequestRefused unless a cache or a copy of the same layers and capacity is here for that client."""
        session, copy = self._sessions.find(plan.key.session), self._copy(plan.key.session)
        if session is not None:
            shape, owner, epoch = (
                (session.span, session.plan.capacity_tokens),
                session.owner,
                session.key.epoch,
            )
        elif copy is not None:
            shape, owner, epoch = (copy.span, copy.plan.capacity_tokens), copy.owner, copy.plan.key.epoch
        else:
            raise RequestRefused("epoch", "nothing of this session is here that could go on")
        if owner.peer_id != link.peer_id or shape != (plan.span_of(hop), plan.capacity_tokens):
            raise RequestRefused(
                "epoch", "what is here of this session is another client's, or of other layers"
            )
        if epoch >= plan.key.epoch:
            raise RequestRefused("epoch", f"epoch {plan.key.epoch} is over, the session is in {epoch}")

    def _copy(self, session: bytes) -> KeptCopy | None:
        return None if self._copying is None else self._copying.keeper.find(session)

    def _left_head(self, move: pb.Move) -> str:
        """The head of the epoch that the session is in, as its client has told this peer."""
        session, copy = self._sessions.get(move.session, move.epoch), self._copy(move.session)
        plan = session.plan if session is not None else None if copy is None else copy.plan
        return "" if plan is None or plan.key.epoch != move.epoch else plan.hops[0].peer_id

    def _epoch_over(self, session: ServedSession, position: int, token_id: int) -> None:
        """The token has come with which the next epoch begins, at this head or at another."""
        move = self._moves.pop(session.key, None)
        if move is None:
            return
        if move.peer_id == self._peer_id:
            known = self._prepared.get(move.session)
            if known is not None and known.key.epoch == move.next_epoch and known.hop == 0:
                self._go_on(known, position, token_id)
                return
            detail = "the next epoch is not known at its head"
        else:
            link = self._links.find(move.peer_id)
            told = pb.Move(
                session=move.session,
                epoch=move.epoch,
                next_epoch=move.next_epoch,
                peer_id=move.peer_id,
                token_id=token_id,
                position=position,
            )
            if link is not None and link.post(told, sessions=(move.session,)):
                return
            detail = "no open link to the next epoch's head"
        self._stepper.fail_session(session, self._peer_id, "move", detail)

    def _go_on(self, known: PreparedEpoch, position: int, token_id: int) -> None:
        """At the next epoch's head."""

        def continue_session() -> None:
            session = self._sessions.get(*known.key)
            if session is not None:
                self._stepper.continue_session(session, position, token_id)

        if known.beginning is None:
            known.waiting.append(continue_session)
            self._begin(known, position)

    def _begin(self, known: PreparedEpoch, position: int) -> None:
        if known.beginning is None:
            name = f"begin epoch {known.key.epoch}"
            known.beginning = asyncio.create_task(self._begin_when_whole(known, position), name=name)

    async def _begin_when_whole(self, known: PreparedEpoch, position: int) -> None:
        """The session goes on here from that position, as soon as all before it is here."""
        key = known.key
        try:
            await self._whole(key.session, position)
            self._admission.reserve(known.owner, known.plan, known.hop, advances=True)
            readiness = await _ready(self._admission, key, known.owner.peer_id, self._timeouts.whole_s)
            if not readiness.ready or readiness.held_tokens < position:
                raise RequestRefused("memory", f"{readiness.held_tokens} tokens are here, not {position}")
        except RequestRefused as refused:
            known.fail(self._peer_id, refused.detail)
            return
        finally:
            if self._prepared.get(key.session) is known:
                del self._prepared[key.session]
        try:
            for history in known.histories:
                self._stepper.on_history(known.owner, history)
            for action in known.waiting:
                action()
        except ProtocolError as error:
            known.fail(self._peer_id, str(error))

    async def _whole(self, session: bytes, position: int) -> None:
        """Returns when the copy here, if there is one, covers so many tokens. Raises RequestRefused."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._timeouts.whole_s
        while (copy := self._copy(session)) is not None:
            if copy.intake.kept_tokens >= position:
                return
            if clock() >= until_s:
                detail = f"the copy covers {copy.intake.kept_tokens} tokens, not {position}"
                raise RequestRefused("memory", detail)
            await asyncio.sleep(BEGIN_EVERY_S)

    def _drop(self, known: PreparedEpoch | None) -> None:
        if known is None:
            return
        if (copy := self._copy(known.key.session)) is not None:
            copy.is_awaited = False
        if known.beginning is not None:
            known.beginning.cancel()


async def _ready(admission: Admission, key: LeaseKey, owner: str, wait_s: float) -> pb.Readiness:
    """Whether the epoch's lease has become ready; given back if the epoch is given up meanwhile, for nobody else knows
    of it then. Raises RequestRefused."""
    try:
        return await admission.await_ready(key, owner, wait_s)
    except asyncio.CancelledError:
        with suppress(RequestRefused):  # the client may have ended it as well
            admission.release(pb.Release(session=key.session, epoch=key.epoch), owner)
        raise


def _alone(header: pb.Activations, key: LeaseKey) -> pb.Activations:
    """The header of the same rows, of which those of that epoch alone are anybody's."""
    alone = pb.Activations()
    alone.CopyFrom(header)
    for row in alone.rows:
        if (row.session, row.epoch) != (key.session, key.epoch):
            row.session = b""
    return alone


def _lacking_tokens(copy: KeptCopy | None) -> int:
    """What the copy here lacks; 0 without one, as at a hop that stays."""
    if copy is None:
        return 0
    return copy.plan.capacity_tokens if not copy.intake.kept_tokens else copy.intake.lacking_tokens
