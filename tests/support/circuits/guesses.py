"""Guesses to test with: of what is known to come, right, wrong in the end, or by chance."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from molink.peer.engine.sessions import ServedSession
from molink.peer.scheduling.trip_load import NO_GUESSES, TripBegun, TripLoad
from molink.peer.wire.protocol import molink_pb2 as pb


@dataclass
class Oracle:
    """Knows what comes."""

    sequence: Sequence[int]
    """The whole of it, prompt included."""
    most: int = 4
    begun: TripBegun = NO_GUESSES
    known: list[int] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)
    """Of each trip with guesses: how many, and how many of them were right."""

    def extend(self, token_ids: Sequence[int]) -> None:
        self.known.extend(token_ids)

    def coming(self, most: int) -> tuple[int, ...]:
        return tuple(self.sequence[len(self.known) :][: min(most, self.most)])

    def propose(self, most: int, _: TripLoad) -> tuple[int, ...]:
        return self.coming(most)

    def expect(self, token_ids: Sequence[int]) -> None:
        pass

    def record(self, guessed: int, accepted: int) -> None:
        self.records.append((guessed, accepted))


class LastWrong(Oracle):
    """Its last guess is never right."""

    def propose(self, most: int, _: TripLoad) -> tuple[int, ...]:
        *right, last = self.coming(most) or (None,)
        return () if last is None else (*right, (last + 1) % 256)  # type: ignore[return-value] # numbers, as `coming`


class NeverRight(Oracle):
    """None of its guesses is."""

    def propose(self, most: int, _: TripLoad) -> tuple[int, ...]:
        return tuple((one + 1) % 256 for one in self.coming(most))


@dataclass
class Chance(Oracle):
    """So many guesses as chance will have it, each right with three chances in four; otherwise for each sequence."""

    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(str([*self.sequence]))

    def propose(self, most: int, _: TripLoad) -> tuple[int, ...]:
        guesses = self.coming(self.chance.randint(0, most))
        return tuple(one if self.chance.random() < 0.75 else self.chance.randrange(256) for one in guesses)


class GuessingHead:
    """The guesses of a peer's sessions, of sequences that are known beforehand."""

    def __init__(self, kind: type[Oracle], sequences: Sequence[Sequence[int]], most: int = 4) -> None:
        self.kind = kind
        self.sequences = sequences
        self.most = most
        self.sources: list[Oracle] = []
        self.starts: list[pb.Start] = []
        """What the client has said to guess from."""

    def __call__(self, session: ServedSession, start: pb.Start) -> Oracle:
        """By the sessions' numbers, from 1 on."""
        self.starts.append(start)
        source = self.kind(self.sequences[session.key.session[0] - 1], self.most)
        self.sources.append(source)
        return source

    @property
    def guessed(self) -> int:
        return sum(guessed for one in self.sources for guessed, _ in one.records)

    @property
    def accepted(self) -> int:
        return sum(accepted for one in self.sources for _, accepted in one.records)
