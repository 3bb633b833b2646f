"""Hops as their cores alone whose sessions go over to standbys, by the word of a circuit's core, among losses.

What a peer does around its core is modelled by the rules of `PreparedEpochs`: an epoch that was prepared begins with
its first rows, or at the head with the token that is handed over, once the copy covers all before them.
"""

from collections.abc import Sequence
from typing import Any

from support.swarms.epoch_ring import EpochRing, ModelledCache
from support.swarms.hop_ring import Generation

from molink.client.circuit import circuit_core as client
from molink.peer.hop import events
from molink.peer.hop.session import HopSession
from molink.shards.kv.prefix import common_position


class MoveRing(EpochRing):
    """One generation, with a spare peer for each of its hops that keeps a copy of the hop's cache."""

    def __init__(self, hops: int, *arguments: Any) -> None:  # noqa: ANN401 - as HopRing
        super().__init__(*arguments)
        (self.one,) = self.generations
        self.hops = hops
        self.core = client.CircuitCore()
        self.core.handle(client.Begin(1e9), 0.0)
        self.core.handle(client.Planned(tuple(map(str, self.one.peers))), 0.0)
        self.core.handle(client.Ready(), 0.0)
        self.table: dict[int, HopSession] = dict(zip(self.one.peers, self.one.sessions, strict=True))
        """The session at each peer, in the epoch that it is in there."""
        self.held = {peer: self.caches[0, hop] for hop, peer in enumerate(self.one.peers)}
        """The cache, or the copy, at each peer."""
        self.held |= {hop + hops: ModelledCache() for hop in range(hops)}
        self.prepared: dict[int, HopSession] = {}
        self.waiting: dict[int, tuple[int, Any]] = {}
        """At peers whose epoch is about to begin: the position behind what they need, and what is told then."""
        self.asked: list[int] = []
        """Peers that have not been told of the next epoch yet."""
        self.dead: set[int] = set()
        self.upcoming: list[int] = []
        self.before: list[int] | None = None
        self.history = self.one.prompt_tokens
        """Tokens that the client has, in order."""
        self.early: list[int] = []
        self.delivered: list[tuple[int, int]] = []
        """On their way to the client: epoch and position."""
        self.moves: list[tuple[str, Any]] = []
        """Words to heads on their way."""
        self.moved = 0

    # -- the client

    def want_move(self, hops: Sequence[int]) -> None:
        """Standbys are to take the places of these hops."""
        self.upcoming = [self.other(peer) if hop in hops else peer for hop, peer in enumerate(self.one.peers)]
        (prepare,) = self.core.handle(client.MoveWanted(tuple(map(str, self.upcoming))), self.now_s)
        assert isinstance(prepare, client.Prepare)
        self.asked = list(self.upcoming)

    def prepare(self, peer: int) -> None:
        """One hop hears of the next epoch; when all have, the session goes over."""
        self.asked.remove(peer)
        if peer in self.dead:
            self.core.handle(client.NotPrepared(), self.now_s)
            self.asked.clear()
            self.prepared.clear()
            return
        self.prepared[peer] = self._session(self.upcoming, self.upcoming.index(peer), self.core.last_epoch)
        if not self.asked:
            self.moves.append(("ask", (self.one.peers[0], self.core.epoch)))
            self.core.handle(client.Prepared(), self.now_s)
            self.before, self.one.peers = list(self.one.peers), list(self.upcoming)
            self.epochs[0] = self.core.epoch

    def lose(self, peer: int) -> None:
        """That peer is gone, with all that it had and all that is on its way to it or from it."""
        self.dead.add(peer)
        self.held.pop(peer)
        self.table.pop(peer, None)
        self.prepared.pop(peer, None)
        self.waiting.pop(peer, None)
        self.engines.pop(peer, None)
        for ends in [ends for ends in self.links if peer in ends]:
            self.links[ends].clear()
        self.moves = [one for one in self.moves if one[1][0] != peer]
        if peer in self.one.peers or (self.before is not None and peer in self.before):
            self.recover(peer)

    def recover(self, peer: int | None) -> None:
        """The client knows of a loss, or that the next epoch has not begun: it goes on in another one."""
        stays = self.before is not None and peer not in self.one.peers
        standby = "" if peer is None or stays else str(self.other(peer))
        lost = client.Lost(peer_id=str(peer), standby=standby, stays=stays)
        (seize,) = self.core.handle(lost, self.now_s)
        assert isinstance(seize, client.Seize)
        self.one.peers = [int(one) for one in self.core.peer_ids]
        assert not self.dead.intersection(self.one.peers)
        self.before, self.asked, self.early = None, [], []
        self.prepared.clear()
        self.waiting.clear()
        self.delivered.clear()
        self.one.got = self.history - self.one.prompt_tokens
        self.epochs[0] = seize.epoch
        self.forming[0] = list(range(self.hops))
        self.offers[0] = []

    def reserve(self, one: Generation, hop: int, kind: str) -> None:
        """As any hop of a later epoch: its cache, or its copy, goes on."""
        peer = one.peers[hop]
        self.forming[0].remove(hop)
        session = self._open(peer, self._session(one.peers, hop, self.epochs[0]))
        held, cache = self.held[peer].settle(), self.held[peer]
        least = {"all": 0, "latest": min(cache.began, held), "whole": held, "nothing": 0}[kind]
        if kind == "nothing":
            cache.begin(0)
            held = 0
        self.tell(peer, events.SessionReady(session, held, least))
        self.offers[0].append((least, min(held, self.history - 1)))
        if self.forming[0]:
            return
        del self.forming[0]
        self.core.handle(client.Ready(), self.now_s)
        one.sessions = [self.table[peer] for peer in one.peers]
        self.start(one, common_position(self.offers.pop(0)))

    def take_token(self) -> None:
        """The client gets a token; tokens of one epoch come in order, and those of two from two heads as they like."""
        epoch, position = self.delivered.pop(0)
        if epoch == self.core.epoch and self.before is not None and position > self.history:
            self.early.append(position)
            return
        assert position == self.history, "a token is lost, or comes twice"
        self.history += 1
        if epoch == self.core.epoch and self.before is not None:
            self._arrive()
        while self.early and self.early[0] == self.history:
            self.early.pop(0)
            self.history += 1
            self._arrive()

    def _arrive(self) -> None:
        """The first token has come over the next circuit: who left is released."""
        before, self.before = self.before, None
        for peer in before or ():
            if peer not in self.one.peers and peer not in self.dead:
                self.tell(peer, events.SessionEnded(self.table.pop(peer)))
        self.moved += before is not None

    # -- what may happen next

    def copying(self) -> list[int]:
        """Hops whose standby lacks something that their cache has."""
        running = self.before or self.one.peers
        pairs = [(peer, self.other(peer)) for peer in running]
        return [
            peer
            for peer, other in pairs
            if not {peer, other} & self.dead and peer in self.table and other not in self.table
            and len(self.held[other].tokens) < self.held[peer].certain
        ]  # fmt: skip

    def copy(self, peer: int) -> None:
        """The standby gets all that it lacks."""
        copy, cache = self.held[self.other(peer)], self.held[peer]
        copy.tokens, copy.certain = cache.tokens[: cache.certain], cache.certain

    def beginning(self) -> list[int]:
        """Peers that have all that they need to begin."""
        return [peer for peer, (position, _) in self.waiting.items() if self.held[peer].certain >= position]

    def begin(self, peer: int) -> None:
        """The epoch that was prepared begins there."""
        _, told = self.waiting.pop(peer)
        session = self._open(peer, self.prepared.pop(peer))
        held = self.held[peer].settle()
        self.tell(peer, events.SessionReady(session, held, min(self.held[peer].began, held)))
        self.tell(peer, told(session))

    def carry_move(self, at: int) -> None:
        """A word to a head arrives."""
        what, (peer, *words) = self.moves.pop(at)
        if what == "ask":
            session = self.table.get(peer)
            if session is not None and session.key.epoch == words[0]:
                self.tell(peer, events.MoveAsked(session))
        else:
            self._hand_over(peer, *words)

    # -- peers

    def other(self, peer: int) -> int:
        return peer + self.hops if peer < self.hops else peer - self.hops

    def _session(self, peers: list[int], hop: int, epoch: int) -> HopSession:
        one = Generation(0, peers, self.one.prompt_tokens, self.one.new_tokens)
        return self.session(one, hop, epoch)

    def _open(self, peer: int, session: HopSession) -> HopSession:
        older = self.table.get(peer)
        if older is not None:
            self.tell(peer, events.SessionEnded(older))
        self.table[peer] = session
        self.tell(peer, events.SessionOpened(session))
        return session

    def _hand_over(self, peer: int, epoch: int, position: int) -> None:
        prepared = self.prepared.get(peer)
        if prepared is not None and prepared.key.epoch == epoch:
            self.waiting[peer] = (
                position,
                lambda session: events.SessionContinued(session, position, (position,)),
            )

    def _note(self, peer: int, effect: events.HopEffect[HopSession, Any]) -> None:
        if isinstance(effect, events.EpochOver):
            if effect.session.key.epoch + 1 == self.core.epoch and self.before is not None:
                head = self.one.peers[0]
                word = (head, self.core.epoch, effect.position)
                if head == peer:
                    self._hand_over(*word)
                elif head not in self.dead:
                    self.moves.append(("token", word))
        elif isinstance(effect, events.DeliverTokens):
            for session, _, position, *_ in effect.tokens:
                if session.key.epoch in (self.core.epoch, self.core.epoch - (self.before is not None)):
                    self.delivered.append((session.key.epoch, position))
        else:
            super()._note(peer, effect)

    def _carry(self, ends: tuple[int, int]) -> None:
        """Rows of an epoch that has not begun wait for it."""
        sender, receiver = ends
        what, message = self.links[ends][0]
        prepared = self.prepared.get(receiver)
        if what == "rows" and prepared is not None:
            first = message.steps[0]
            if first.session.key == prepared.key and prepared.previous_peer_id == f"{sender}":
                self.links[ends].popleft()
                row = (first.step, first.tokens, first.draws, first.prefill, first.position, first.payload)
                self.waiting[receiver] = (
                    first.position,
                    lambda session: events.RowsArrived(f"{sender}", [(session, *row)]),
                )
                return
        super()._carry(ends)

    def _there(self, session: HopSession, peer: int) -> HopSession | None:
        there = self.table.get(peer)
        return there if there is not None and there.key == session.key else None

    def _cache(self, step: Any) -> ModelledCache:  # noqa: ANN401 - as EpochRing
        place = step.session.place
        cache = self.held[int(place.circuit[place.hop][0])]
        assert step.session.key.epoch >= getattr(cache, "epoch", 0), "a holder of an old epoch goes on"
        cache.epoch = step.session.key.epoch  # type: ignore[attr-defined]
        return cache

    def _link(self, peer: int, other: str) -> Any:  # noqa: ANN401 - as HopRing
        link = super()._link(peer, other)
        if int(other) in self.dead:
            link.clear()
        return link
