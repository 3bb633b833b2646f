"""Which pair of instances takes a prompt, and which copy of keys and values is made next. Pure.

Sections 4.1.3 and 4.2.2 of the redundancy paper (AcceLLM). An instance belongs to one pair, for good.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from molink.peer.redundancy.pair_balance import HeldSequence

UNEVEN_SEQUENCES = 2
"""For each instance: so many more of one pair than of another, and a sequence goes over."""


@dataclass(frozen=True, slots=True)
class PairRoom:
    """A pair as the choice for a new prompt sees it."""

    pair: int
    free_tokens: int
    """Of keys and values, of both instances; what copies take is not free."""
    waiting: int
    """Prompts that it has taken and not computed."""


@dataclass(frozen=True, slots=True)
class PairLoad:
    """A pair as the choice of the next copy sees it."""

    instances: tuple[int, ...]
    sequences: tuple[HeldSequence, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Keys and values of one sequence, to be sent in the background."""

    number: int
    source: int
    target: int
    goes_over: bool
    """The sequence belongs to the target's pair when the copy is complete; otherwise its pair then has it twice."""


def spread(rooms: Sequence[PairRoom], room_tokens: Sequence[int]) -> tuple[int, ...]:
    """The pair for each of the prompts that came at the same time, in their order; `room_tokens` is what each may take.

    The pair with the most free memory takes the next; of several that come at once each pair takes as many.

    Raises:
        ValueError: there is no pair.
    """
    free = {room.pair: room.free_tokens for room in rooms}
    waiting = {room.pair: room.waiting for room in rooms}
    chosen = []
    for tokens in room_tokens:
        pair = min(free, key=lambda one: (waiting[one], -free[one], one))
        waiting[pair] += 1
        free[pair] -= tokens
        chosen.append(pair)
    return tuple(chosen)


def next_copy(
    pairs: Sequence[PairLoad], free_tokens: Mapping[int, int], idle: Collection[int]
) -> Copy | None:
    """What an idle line is best used for; None: nothing that fits.

    First a second copy inside a pair, so that the pair can balance its sequences and prefill without delaying them.
    Then, gradually, a sequence of the fullest pair for the emptiest one. The shortest go first: they cost the least.

    Args:
        free_tokens: Of each instance.
        idle: Instances whose line outwards has nothing to send.
    """
    second = min(_seconds(pairs, free_tokens, idle), default=None)
    if second is not None:
        _, number, source, target = second
        return Copy(number, source, target, goes_over=False)
    return _over(pairs, free_tokens, idle)


def _seconds(
    pairs: Sequence[PairLoad], free_tokens: Mapping[int, int], idle: Collection[int]
) -> Iterator[tuple[int, int, int, int]]:
    for pair in pairs:
        for one in pair.sequences:
            if len(one.holders) > 1 or one.home not in idle:
                continue
            for target in pair.instances:
                if target != one.home and free_tokens[target] >= one.room_tokens:
                    yield one.tokens, one.number, one.home, target


def _over(pairs: Sequence[PairLoad], free_tokens: Mapping[int, int], idle: Collection[int]) -> Copy | None:
    if len(pairs) < 2:
        return None
    full = max(pairs, key=_sequences_each)
    empty = min(pairs, key=_sequences_each)
    if _sequences_each(full) - _sequences_each(empty) < UNEVEN_SEQUENCES:
        return None
    target = max(empty.instances, key=lambda one: (free_tokens[one], -one))
    movable = [
        one
        for one in full.sequences
        if one.home in idle and target not in one.holders and one.room_tokens <= free_tokens[target]
    ]
    best = min(movable, key=lambda one: (one.tokens, one.number), default=None)
    return None if best is None else Copy(best.number, best.home, target, goes_over=True)


def _sequences_each(pair: PairLoad) -> float:
    return len(pair.sequences) / len(pair.instances)
