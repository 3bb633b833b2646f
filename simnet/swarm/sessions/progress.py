"""Progress of a simulated session as a fluid: tokens flow at the rate of the circuit, as that is loaded now."""

from dataclasses import dataclass, field

from molink.simnet.swarm.sessions.guessed_trips import NOTHING_GUESSED, GuessedTrips
from molink.simnet.swarm.sessions.step_cost import PeerLoad


@dataclass(slots=True, eq=False)
class DecodeProgress:
    """Tokens of one session, and when the last of them will be there."""

    new_tokens: int
    """That it is to have in the end."""
    own_ms: list[float] = field(default_factory=list)
    """Of each hop, what does not depend on others."""
    hop_ms: list[float] = field(default_factory=list)
    """Of each hop for one trip, at the present loads; `trip_ms` is their sum."""
    guessed: GuessedTrips = NOTHING_GUESSED
    trip_ms: float = 0.0
    tpot_ms: float = 0.0
    """What of a trip one of its tokens takes."""
    trips: float = 0.0
    """Times round its circuits, so far."""
    tokens: float = 0.0
    """So far; the first comes with the end of the prefill."""
    advanced_s: float = 0.0
    """When `tokens` was counted."""
    due_s: float = 0.0
    """When it ends at the present rate."""
    rings_s: float = float("inf")
    """When it looks at that next."""

    def reload(self, at: int, layers: int, load: PeerLoad) -> None:
        """The peer of a hop of so many layers is loaded otherwise from now on."""
        self.hop_ms[at] = load.hop_ms(layers, self.own_ms[at])
        self.trip_ms = sum(self.hop_ms)
        self.tpot_ms = self.trip_ms / self.guessed.tokens

    def count(self, now_s: float) -> None:
        """Counts the tokens since the last look, at the rate that held; whole ones when it ends."""
        if self.tpot_ms > 0:
            made = (now_s - self.advanced_s) * 1000 / self.tpot_ms
            self.trips += made / self.guessed.tokens
            self.tokens = min(float(self.new_tokens), self.tokens + made)

    def end(self) -> None:
        """The last token is there: what is left since the last look has come."""
        self.trips += (self.new_tokens - self.tokens) / self.guessed.tokens
        self.tokens = float(self.new_tokens)

    def finish_s(self) -> float:
        """When the last token will be there at the present rate."""
        left = self.new_tokens - self.tokens
        return self.advanced_s + max(0.0, left) * self.tpot_ms / 1000


@dataclass(slots=True, eq=False)
class SessionRecord:
    """What accounts want to know of one session when it has ended."""

    first_token_s: float | None = None
    lost_s: float | None = None
    """When it lost a peer, until its next token: what it computes meanwhile it has computed before."""
    stalled_s: float = 0.0
    """When it lost a peer last."""
    attempts: int = 0
    losses: int = 0
    recomputed_tokens: int = 0
    successors_given_up: int = 0
    successor: int | None = None
    """Number of the one that it has gone over to last."""
