"""As `move_ring.py`, among faults of every kind: peers and links that are lost, peers that the client gives up while
they live, prepared epochs that are refused, and words that come late, twice, or behind others that were said later.

What the client takes is decided by its own `RunningCircuit` and `TokenStream`, and its epochs by `CircuitCore`.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from support.circuits.move_ring import MoveRing
from support.swarms.epoch_ring import ModelledCache
from support.swarms.hop_ring import Generation, core_of

from molink.client.circuit import circuit_core as client
from molink.client.circuit.circuit_builder import ActiveCircuit
from molink.client.circuit.moves import RunningCircuit, TokenArrival
from molink.client.circuit.token_rules import TokenRules, TokenStream
from molink.client.epochs.circuit_events import Refusal
from molink.peer.hop import events
from molink.peer.hop.session import HopSession
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.wire.protocol import molink_pb2 as pb

LIMITS = BatchLimits(40, 4)
NEW_TOKENS = 5


class FaultyRing(MoveRing):
    """One generation on pairs of peers, of which one at least lives for each span."""

    def __init__(self, hops: int, *arguments: Any) -> None:  # noqa: ANN401 - as HopRing
        super().__init__(hops, *arguments)
        end = self.one.prompt_tokens + self.one.new_tokens
        self.rules = TokenRules(end - 1, 10**6, frozenset(), None)
        self.run: RunningCircuit | None = self._running()
        self.late: list[tuple[str, Any]] = []
        """Prepared epochs, releases and repeated frames that are still on their way."""
        self.next_heads: dict[int, tuple[int, int]] = {}
        """At heads that were asked for a move: to which epoch, and which head."""
        self.hops_of = {self.core.epoch: list(self.one.peers)}
        """By epoch."""
        self.left: list[int] = []
        """Epochs whose leases are given back when another circuit stands."""
        self.ran = 0
        """Circuits that were started before the latest token came."""
        self.stalls = 0
        """Times that the client waited for a token in vain."""

    # -- the client

    @property
    def fruitless(self) -> int:
        """Circuits in a row that have yielded nothing: of too many the client gives up."""
        return self.core.runs - self.ran

    @property
    def is_calm(self) -> bool:
        """Whether a move may be wanted."""
        return not self.forming and not self.asked and self.run is not None and self.run.before is None

    def want_move(self, hops: Sequence[int]) -> None:
        if all(self._keeps_copy(self.other(self.one.peers[hop])) for hop in hops):
            super().want_move(hops)

    def prepare(self, peer: int) -> None:
        run = self.run
        assert run is not None
        self._catch_up(peer)
        session = self._session(self.upcoming, self.upcoming.index(peer), self.core.last_epoch)
        if peer in self.dead or not self._prepares(peer, session):
            self.refuse()
            return
        self.asked.remove(peer)
        if self.asked:
            return
        self.core.handle(client.Prepared(), self.now_s)
        word = (self.one.peers[0], run.circuit.descriptor.epoch, self.core.epoch, self.upcoming[0])
        self.moves.append(("ask", word))
        self.before, self.one.peers = self.one.peers, list(self.upcoming)
        before, run.circuit = run.circuit, self._circuit()
        self.hops_of[self.core.epoch] = list(self.upcoming)
        run.before = before

    def refuse(self) -> None:
        """Some hop cannot begin the epoch that is being prepared: others hear so later, or of the epoch at all."""
        self.core.handle(client.NotPrepared(), self.now_s)
        self._leave_asked()

    def suspect(self, peer: int | None) -> None:
        """The client gives up a peer that may live, or the circuit as a whole: it goes on in another epoch."""
        run, self.run = self.run, None
        if run is None:
            return
        self.left += [one.descriptor.epoch for one in (run.before, run.circuit) if one is not None]
        stays = run.before is not None and (peer is None or peer not in self.one.peers)
        standby = ""
        if peer is not None and not stays:
            for link in () if run.before is None else run.before.links:
                link.closed_because = "it is gone" if int(link.peer_id) in self.dead else None
            kept = str(self.other(peer)) if self._keeps_copy(self.other(peer)) else ""
            standby = run.left_for(str(peer)) or kept
        self._leave_asked()
        lost = client.Lost(peer_id="" if peer is None else str(peer), standby=standby, stays=stays)
        self._follow(self.core.handle(lost, self.now_s), peer)

    def recover(self, peer: int | None) -> None:
        """Of a peer that is lost: also one of a circuit that is only being formed."""
        if self.run is not None:
            self.suspect(peer)
        elif self.forming and peer in self.one.peers:
            del self.forming[0]
            refused = client.ReservationRefused(Refusal("lost"), 1.0)
            self._follow(self.core.handle(refused, self.now_s), peer)

    def _follow(self, effects: Sequence[client.Effect], left: int | None) -> None:
        """Until hops are asked for leases."""
        while True:
            effect = effects[-1]
            match effect:
                case client.AwaitNews():
                    effects = self.core.handle(client.Waited(), self.now_s)
                case client.Plan():
                    planned = [
                        next(one for one in (peer, self.other(peer)) if one not in self.dead and one != left)
                        if {peer, self.other(peer)} - self.dead - {left}
                        else cast("int", left)
                        for peer in self.one.peers
                    ]
                    effects = self.core.handle(client.Planned(tuple(map(str, planned))), self.now_s)
                case client.Reserve(epoch) | client.Seize(epoch):
                    break
                case _:
                    raise AssertionError(f"{effect} while a copy of each span lives")
        self.before, self.one.peers = None, [int(one) for one in self.core.peer_ids]
        self.one.got = self.history - self.one.prompt_tokens
        self.epochs[0] = epoch
        self.hops_of[epoch] = list(self.one.peers)
        self.forming[0] = list(range(self.hops))
        self.offers[0] = []

    def reserve(self, one: Any, hop: int, kind: str) -> None:  # noqa: ANN401 - a generation
        if one.peers[hop] in self.dead:
            self.recover(one.peers[hop])  # it has not been noticed before
            return
        self._catch_up(one.peers[hop])
        super().reserve(one, hop, kind)
        if not self.forming:
            self.run = self._running()
            self._release_others()

    def take_token(self) -> None:
        epoch, position, sender = self.delivered.pop(0)  # type: ignore[misc]
        run = self.run
        if run is None or run.intake is None or not run.sends(f"{sender}", epoch):
            return
        is_last = position == self.rules.last_position
        token = pb.Token(epoch=epoch, position=position, finish=pb.LENGTH if is_last else pb.NOT_FINISHED)
        taken = run.in_order(TokenArrival(token, self.now_s), run.intake)
        for arrival in taken:
            assert arrival.token.position == self.history, "a token is lost, or comes twice"
            self.history += 1
            self.core.handle(client.Yielded(), self.now_s)
            self.core.handle(client.Taken(), self.now_s)
            self.ran = self.core.runs
        if taken and run.before is not None and taken[-1].token.epoch == run.circuit.descriptor.epoch:
            assert run.before is not None
            self.left.append(run.before.descriptor.epoch)
            run.before = self.before = None
            self.moved += 1
            self._release_others()

    def _circuit(self) -> ActiveCircuit:
        links = tuple(SimpleNamespace(peer_id=f"{peer}", closed_because=None) for peer in self.one.peers)
        descriptor = pb.SessionDescriptor(epoch=self.core.epoch)
        return ActiveCircuit(cast("Any", None), descriptor, cast("Any", links), {}, 0)

    def _running(self) -> RunningCircuit:
        return RunningCircuit(self._circuit(), TokenStream(self.rules, self.history, self.hops))

    def _release_others(self) -> None:
        """Another circuit stands: hops of those that were left give back what they have, but for those that go on."""
        for epoch in self.left:
            self._release(epoch, [peer for peer in self.hops_of[epoch] if peer not in self.one.peers])
        self.left.clear()

    def _release(self, epoch: int, peers: Sequence[int]) -> None:
        self.late += [("release", (peer, epoch)) for peer in peers if peer not in self.dead]

    def _leave_asked(self) -> None:
        """What was being prepared is given up: some hops hear of the epoch and of its end so late."""
        for peer in self.asked:
            session = self._session(self.upcoming, self.upcoming.index(peer), self.core.last_epoch)
            self.late.append(("prepare", (peer, session)))
        if self.asked:
            self._release(self.core.last_epoch, self.upcoming)
        self.asked = []

    def _catch_up(self, peer: int) -> None:
        """What the client has told that peer before arrives before what it tells now."""
        while (at := next((at for at, one in enumerate(self.late) if one[1][0] == peer), None)) is not None:
            self.come_late(at)

    # -- faults

    def lose(self, peer: int) -> None:
        self.next_heads.pop(peer, None)
        self.late = [one for one in self.late if one[0] == "repeat" or one[1][0] != peer]
        self.prepared.pop(peer, None)
        run = self.run
        is_hop = run is not None and run.has(f"{peer}")
        super().lose(peer)
        if is_hop and peer not in self.one.peers:
            self.suspect(peer)

    def cut(self, ends: tuple[int, int]) -> None:
        """The link between two hops is lost, with all that is on its way: what they do for each other ends."""
        for way in (ends, ends[::-1]):
            if way in self.links:
                self.links[way].clear()
            here, there = way
            session = self.table.get(here)
            if session is not None and f"{there}" in (session.next_peer_id, session.previous_peer_id):
                self.tell(here, events.SessionEnded(session))

    def repeat(self, ends: tuple[int, int]) -> None:
        """What a link brings next comes once more later."""
        self.late.append(("repeat", (ends, self.links[ends][0])))

    def come_late(self, at: int) -> None:
        """A word arrives that was on its way for long."""
        what, (where, about) = self.late[at]
        if what != "repeat":  # each link keeps its order
            at = next(before for before, one in enumerate(self.late) if one[1][0] == where)
            what, (where, about) = self.late[at]
        del self.late[at]
        if what == "prepare":
            self._prepares(where, about)
        elif what == "release":
            prepared, session = self.prepared.get(where), self.table.get(where)
            if prepared is not None and prepared.key.epoch == about:
                del self.prepared[where]
                self.waiting.pop(where, None)
            elif session is not None and session.key.epoch == about:
                self.tell(where, events.SessionEnded(self.table.pop(where)))
                self.held[where] = ModelledCache()
        elif not self.dead.intersection(where):
            self.links.setdefault(where, type(self._link(*map(str, where)))()).appendleft(about)
            self._carry(where)

    def begin(self, peer: int) -> None:
        there = self.table.get(peer)
        prepared = self.prepared.get(peer)
        if prepared is None or (there is not None and there.key.epoch >= prepared.key.epoch):
            del self.waiting[peer]
            self.prepared.pop(peer, None)
        else:
            super().begin(peer)

    def carry_move(self, at: int) -> None:
        what, (peer, *words) = self.moves.pop(at)
        if what == "token":
            self._hand_over(peer, *words)
            return
        epoch, next_epoch, next_head = words
        session = self.table.get(peer)
        if session is not None and session.key.epoch == epoch and not session.ended:
            self.next_heads[peer] = (next_epoch, next_head)
            self.tell(peer, events.MoveAsked(session))

    # -- peers

    def _prepares(self, peer: int, session: HopSession) -> bool:
        """Whether that epoch could begin there: it is no older than the one that the peer is in."""
        there = self.table.get(peer)
        if there is not None and there.key.epoch >= session.key.epoch:
            return False
        self.prepared[peer] = session
        self.waiting.pop(peer, None)
        return True

    def _keeps_copy(self, peer: int) -> bool:
        return peer not in self.dead and peer not in self.table

    def _note(self, peer: int, effect: events.HopEffect[HopSession, Any]) -> None:
        if isinstance(effect, events.EpochOver):
            epoch, head = self.next_heads.pop(peer)
            if head == peer:
                self._hand_over(peer, epoch, effect.position)
            elif head not in self.dead:
                self.moves.append(("token", (head, epoch, effect.position)))
        elif isinstance(effect, events.DeliverTokens):
            for session, _, position, *_ in effect.tokens:
                self.delivered.append((session.key.epoch, position, peer))  # type: ignore[arg-type]
        else:
            super()._note(peer, effect)


def ring_of(hops: int, prompt_tokens: int) -> FaultyRing:
    """A generation on peers 0, 1, ..., whose standbys follow them."""
    cores = [core_of(f"{peer}", LIMITS, chunk_tokens=16) for peer in range(2 * hops)]
    return FaultyRing(
        hops, [Generation(0, list(range(hops)), prompt_tokens, NEW_TOKENS)], cores, (1000, 32), 1000
    )


def choices(ring: FaultyRing, moves: int) -> list[tuple[str, Any]]:
    """All that may happen next but for faults."""
    turns: list[tuple[str, Any]] = [("copy", peer) for peer in ring.copying()]
    turns += [("begin", peer) for peer in ring.beginning()]
    turns += [("prepare", peer) for peer in ring.asked]
    turns += [("carry_move", at) for at in range(len(ring.moves))]
    turns += [("come_late", at) for at in range(len(ring.late))]
    turns += [("take_token", None)] if ring.delivered else []
    turns += [("reserve", hop) for hop in ring.forming.get(0, ())]
    turns += [("take", turn) for turn in ring.turns()]
    if moves and ring.is_calm and ring.history > ring.one.prompt_tokens:
        turns += [("want_move", (hop,)) for hop in range(ring.hops)] + [
            ("want_move", tuple(range(ring.hops)))
        ]
    return turns
