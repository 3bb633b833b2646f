"""What guesses bring a simulated session: its trips, played through by the product's own sources and decision.

Sessions flow here at the rate of their circuit. How many tokens a trip brings, and how many rows it has, is found out
when a circuit begins: the rest of the generation is a tape of what the bundled model said once, and for each trip
`SessionGuesses` guesses it and decides how many guesses travel, beside who shares the circuit then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.dht.records.records import PeerFacts
from molink.peer.scheduling.trip_load import BatchLoad, TripLoad
from molink.peer.scheduling.trip_times import UNPREDICTED
from molink.routing.cost.pipeline import PipelineStage, stage_of
from molink.shards.spec import ModelSpec
from molink.simnet.core.guessing import MOST_FIXED, SimulatedSpeculation, TapeGuesser
from molink.simnet.swarm.sessions.step_cost import SimulatedHop


@dataclass(frozen=True, slots=True)
class GuessedTrips:
    """Means over the trips of a session on one circuit."""

    tokens: float = 1.0
    """That a trip brings."""
    rows: float = 1.0
    """That it has at each hop."""


NOTHING_GUESSED = GuessedTrips()


def stages_of(
    hops: Sequence[SimulatedHop], facts: Sequence[PeerFacts], model: ModelSpec, context_tokens: float
) -> tuple[PipelineStage, ...]:
    """The circuit as its head predicts it."""
    return tuple(
        stage_of(one, hop.span, model, hop.link_ms, hop.uplink_mbps, context_tokens)
        for hop, one in zip(hops, facts, strict=True)
    )


def load_of(others: Sequence[GuessedTrips], trip_ms: float, stages: Sequence[PipelineStage]) -> TripLoad:
    """What the head of a circuit knows of its load: the sessions that go round it as well, each a micro-batch, and by
    how much a trip, which takes so long now, takes longer than predicted."""
    predicted_ms = sum(stage.decode_ms(1) + stage.transfer_ms(1) + stage.link_ms for stage in stages)
    rows = [max(1, round(one.rows)) for one in others]
    beside = tuple(BatchLoad(count, one.tokens, count - 1) for count, one in zip(rows, others, strict=True))
    return TripLoad(None, beside, max(0.0, trip_ms - UNPREDICTED * predicted_ms))


def guessed_trips(
    speculation: SimulatedSpeculation,
    number: int,
    new_tokens: int,
    stages: Sequence[PipelineStage],
    load: TripLoad,
) -> GuessedTrips:
    """Plays the trips of a session of that number until so many tokens are there, under that load."""
    guesser = TapeGuesser(speculation, number, stages)
    tokens = trips = rows = 0
    while tokens < new_tokens:
        most = min(MOST_FIXED, new_tokens - tokens - 1)
        _, trip = guesser.propose(None, most, load)
        guesser.record_trip([None] * (guesser.right + 1), trip.guesses)
        tokens, trips, rows = tokens + guesser.right + 1, trips + 1, rows + 1 + trip.guesses
    return GuessedTrips(tokens / trips, rows / trips) if trips else NOTHING_GUESSED
