"""Session log: what became of one generation, for reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from molink.client.epochs.copy_lag import HopCopy
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.errors import PeerLost, SwarmError
from molink.dht.records.records import PeerView
from molink.routing.cost.guesses import why_nothing
from molink.routing.routes.planner import Route
from molink.shards.spec import GUESS_SOURCES, Span


@dataclass(frozen=True, slots=True)
class HopLost:
    """A hop of the present circuit has failed."""

    epoch: int
    peer_id: str
    """Empty where it is not known which: the circuit yields nothing, and all of its hops answer."""
    code: str
    detail: str
    accuser: str = ""
    """The hop that says so of another; empty where the client knows it itself, or the hop says it of itself."""
    at_s: float = 0.0
    """When it was heard of, by the loop's clock. Whoever reads the tokens may take it long after that."""
    unheard_s: float = 0.0
    """How long nothing had come from the hop by then."""

    def not_replaced(self, left: str, span: Span | None, within_s: float, error: SwarmError) -> PeerLost:
        """Makes the error of a session that found no other circuit without the peer that was `left` out."""
        return PeerLost(
            left, span, f"{self.detail}; no circuit took its place within {within_s:g} s: {error}"
        )


@dataclass(slots=True)
class TripCounts:
    """Counts of the trips round circuits that brought one generation's tokens."""

    trips: int = 0
    guessed: int = 0
    """Tokens that travelled as guesses."""
    accepted: int = 0
    """Those of them that became tokens of the generation."""
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of `GUESS_SOURCES`: guessed and accepted, as far as heads say where guesses came from."""
    _latest: tuple[int, int] = (0, -1)
    _sources: list[str] = field(default_factory=list)
    """Of the latest step's guesses: those whose tokens have not come."""

    def record_token(self, epoch: int, step: int, guessed: int, sources: bytes = b"") -> None:
        """Records a token that was drawn in that step. With the first of a step `guessed` says how many guesses it had,
        and `sources` where they came from, as the index of each."""
        if (epoch, step) == self._latest:
            self.accepted += 1
            if self._sources:
                self._count(self._sources.pop(0), accepted=1)
            return
        self._latest = epoch, step
        self.trips += 1
        self.guessed += guessed
        self._sources = [GUESS_SOURCES[one if one < len(GUESS_SOURCES) else 0] for one in sources]
        for source in self._sources:
            self._count(source, guessed=1)

    def _count(self, source: str, guessed: int = 0, accepted: int = 0) -> None:
        before = self.by_source.get(source, (0, 0))
        self.by_source[source] = before[0] + guessed, before[1] + accepted


@dataclass(slots=True)
class SessionLog:
    """Session log: what became of a session, for reports."""

    route: Route | None = None
    names: dict[str, str] = field(default_factory=dict)
    epochs: int = 0
    """Circuits that it has been started on."""
    moves: int = 0
    """Times that it has gone on over another circuit without a pause."""
    losses: list[HopLost] = field(default_factory=list)
    standbys: Mapping[str, HopCopy] = field(default_factory=dict)
    """The copies that there were at the end, by the hops' peers."""
    recoveries: list["HopRecovery"] = field(default_factory=list)
    recovering: "HopRecovery | None" = None
    """Of the latest loss, while no token has come since."""
    is_nameless: bool = False
    """Whether hops may have computed upon a copy: none of what they have gets a name."""
    cached_tokens: int = 0
    """Of the prompt: those that every hop of the first circuit held when it began."""
    prefill_s: float = 0.0
    """From the start on the latest circuit to its first token."""
    arrived_s: list[float] = field(default_factory=list)
    """When each new token came in, by the loop's clock, however late it is taken."""
    trips: TripCounts = field(default_factory=TripCounts)
    no_guesses: str = ""
    """Why nothing can be guessed on the latest circuit; empty: something can."""

    def record_circuit(
        self, route: Route, peers: Mapping[str, PeerView], held_tokens: int, runs: int
    ) -> None:
        """Records that the session begins on that circuit, whose hops all hold so many tokens, as the last of so many
        circuits."""
        if self.route is None:
            self.cached_tokens = held_tokens
        self.epochs = runs
        self._record_hops(route, peers)

    def record_token(self, at_s: float, started_s: float | None) -> None:
        """Records a token, the first of a circuit that was started then, or a later one."""
        self.arrived_s.append(at_s)
        if started_s is not None:
            self.prefill_s = at_s - started_s
        if self.recovering is not None:
            self.recoveries.append(replace(self.recovering, seconds=at_s - self.recovering.lost_s))
            self.recovering = None

    def record_move(self, route: Route, peers: Mapping[str, PeerView]) -> None:
        """Records that the session has gone on over that circuit without a pause."""
        self.moves += 1
        self._record_hops(route, peers)

    def _record_hops(self, route: Route, peers: Mapping[str, PeerView]) -> None:
        self.route = route
        self.names.update({peer_id: view.facts.name for peer_id, view in peers.items()})
        self.no_guesses = why_nothing([peers[hop.peer_id].facts for hop in route.hops])

    def record_recovery(self, tokens: int, route: Route, seized: PlannedRoute | None) -> None:
        """Records that a circuit stands after a loss, if there was one, and that so many tokens are computed again."""
        if self.recovering is not None:
            span = self.recovering.span
            holders = [(hop.span, hop.peer_id) for hop in route.hops]
            standbys = () if seized is None else seized.route.hops
            by_standby = any(hop.span == span and (span, hop.peer_id) in holders for hop in standbys)
            self.recovering = replace(self.recovering, recomputed_tokens=tokens, by_standby=by_standby)


@dataclass(frozen=True, slots=True)
class HopRecovery:
    """Recovery from the loss of a hop."""

    peer_id: str
    span: Span | None
    lost_s: float
    """When the client knew, by the loop's clock."""
    recomputed_tokens: int = 0
    by_standby: bool = False
    """Whether the hop's standby went on with its copy; else another circuit did."""
    seconds: float = 0.0
    """From then to the next token."""
