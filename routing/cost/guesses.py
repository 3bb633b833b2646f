"""What guesses make of a token's time: how many tokens a trip round a circuit brings, by its head. Pure.

With guesses a trip brings those that were right and a token more, and takes longer: by the guessing, and by the rows
that every hop computes and sends beside. How often a head's guesses are right a router knows from its own earlier
generations over that head. Before, and for a while beside these, it assumes what drafts of the kind brought where they
were measured. So what a stranger says of its drafts decides of the kind alone: it gains what that kind is assumed to
bring at most, until some trips have shown what it brings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from molink.dht.records.records import PeerFacts
from molink.routing.arrays import FloatArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.reliability import PeerObservation
from molink.shards.spec import GUESSES, MOST_GUESSED_TOKENS


@dataclass(frozen=True, slots=True)
class GuessingHead:
    """What a head's guesses are expected to be; by default it makes none."""

    chance: float = 0.0
    """That a guess is right, if those before it in its trip are: 0 to below 1."""
    guess_ms: float = 0.0
    """That one guess takes."""
    kind: str = ""
    """What of its drafts says most, for people."""
    trips: int = 0
    """That this was measured on; 0: it is assumed."""

    def tokens(self, guesses: int) -> float:
        """That a trip with so many guesses is expected to bring."""
        return sum(self.chance**place for place in range(guesses + 1))


NO_GUESSES = GuessingHead()


def guessing_head(facts: PeerFacts, seen: PeerObservation, cost: CostModel) -> GuessingHead:
    """What is expected of a peer as the head, by what it announces and what the router has seen of its trips. Who
    announces nothing is expected to guess nothing until it has been seen to."""
    if GUESSES not in facts.sampling_abilities:
        return NO_GUESSES
    assumed, kind = 1.0, ""
    for draft in facts.drafts:
        of_kind = cost.draft_tokens_per_trip if draft.tokenizer else cost.lookup_tokens_per_trip
        if of_kind > assumed:
            assumed, kind = of_kind, draft.name
    known = cost.assumed_trips * assumed + seen.trip_tokens
    tokens = min(known / (cost.assumed_trips + seen.trips), cost.most_tokens_per_trip)
    if tokens <= 1:
        return NO_GUESSES
    # a chance of q for each of many guesses brings 1 + q + q^2 + ... = 1 / (1 - q)
    return GuessingHead(1 - 1 / tokens, sum(one.guess_ms for one in facts.drafts), kind, seen.trips)


def why_nothing(circuit: Sequence[PeerFacts]) -> str:
    """Why nothing can be guessed on a circuit of these peers, in order, in a few words; empty: something can."""
    for facts in circuit:
        if GUESSES not in facts.sampling_abilities:
            return f"{facts.name or facts.peer_id[-8:]} takes no guesses"
    head = circuit[0]
    return "" if head.drafts else f"the head, {head.name or head.peer_id[-8:]}, guesses nothing"


def best_guesses(head: GuessingHead, trip_ms: Callable[[int], float]) -> tuple[int, float]:
    """With how many guesses a token takes least, and how many milliseconds, where a trip with so many takes `trip_ms`
    without the guessing."""
    best, least_ms, tokens, chance = 0, trip_ms(0), 1.0, 1.0
    for guesses in range(1, MOST_GUESSED_TOKENS + 1 if head.chance else 1):
        chance *= head.chance
        tokens += chance
        token_ms = (trip_ms(guesses) + guesses * head.guess_ms) / tokens
        if token_ms < least_ms:
            best, least_ms = guesses, token_ms
    return best, least_ms


def trip_shares(heads: Sequence[GuessingHead], trip_ms: float) -> FloatArray:
    """[heads]: the part of a trip of so many milliseconds that a token takes, 1 at most; 0: it is not known how long a
    trip is, and guessing takes no time beside it."""
    if not trip_ms:
        return np.array([1 - one.chance for one in heads])
    return np.array([best_guesses(one, lambda _: trip_ms)[1] for one in heads]) / trip_ms
