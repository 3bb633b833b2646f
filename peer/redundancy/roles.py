"""Who of some instances prefills while the others decode, and what is copied when memory is short. Pure.

Sections 4.1.2, 4.2.1 and 4.2.5 of the redundancy paper (AcceLLM).
"""

from collections.abc import Sequence
from dataclasses import dataclass

RETURN_PART = 0.9
"""Of all memory: copies of everything must fit into so much before a group that was short is no longer."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance holds."""

    instance: int
    capacity_tokens: int
    """Of keys and values."""
    kept_tokens: int
    """Set aside for the sequences that are at home here."""
    copied_tokens: int
    """Set aside for copies of sequences that are at home elsewhere."""
    alone: int
    """Sequences at home here that nobody else holds: they wait while it prefills."""

    def __post_init__(self) -> None:
        if min(self.kept_tokens, self.copied_tokens, self.alone, self.free_tokens) < 0:
            raise ValueError(f"an instance cannot hold less than nothing, nor more than fits: {self}")

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.kept_tokens - self.copied_tokens


def prefiller(standings: Sequence[Standing]) -> int:
    """The instance that computes the next prompts of its group: the one for which the fewest sequences have to wait,
    then the one with the most free memory.

    Raises:
        ValueError: there is no instance.
    """
    return min(standings, key=lambda one: (one.alone, -one.free_tokens, one.instance)).instance


def prefills_next(*, was_prefilling: bool, waiting: int) -> bool:
    """Whether the instance that prefills computes prompts in its next step, if there are any.

    It takes turns while `waiting` sequences are held by nobody else: they would wait as long as prompts come.
    """
    return not (was_prefilling and waiting)


def is_short(standings: Sequence[Standing], arriving_tokens: int, *, was_short: bool) -> bool:
    """Whether the group cannot hold everything twice, the arriving sequence included.

    A group that was short remains so until that fits with some memory to spare, lest it change at every request.
    """
    capacity = sum(one.capacity_tokens for one in standings)
    twice = 2 * (sum(one.kept_tokens for one in standings) + arriving_tokens)
    return twice > (RETURN_PART * capacity if was_short else capacity)


def keeps_copy(decoders: int, origin_tokens: int, copied_tokens: int, arriving_tokens: int) -> bool:
    """Whether the one instance of a short group that prefills too keeps a copy of what it has computed for another.

    Of each of the `decoders` that only decode it keeps an equal part: a third of three. `origin_tokens` are those
    that the decoder keeps already, `copied_tokens` those of them that are copied.

    Raises:
        ValueError: nobody decodes.
    """
    if decoders < 1:
        raise ValueError(f"an instance that prefills for others needs at least one of them, got {decoders}")
    return decoders * (copied_tokens + arriving_tokens) <= origin_tokens + arriving_tokens
