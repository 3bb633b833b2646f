"""Which counts of threads are worth a try on a processor, and which of them is the best by what was measured. Pure.

A decode step reads all weights once: a few threads may use the whole of the memory's bandwidth, and further ones only
wait for each other. A prompt has arithmetic for every core. So decode decides, and where it makes no difference,
prompts do. Cores are not simply counted, because in a container, beside other programs, or with slow cores beside fast
ones, all of them are often slower than some.
"""

from collections.abc import Mapping
from dataclasses import dataclass

AS_FAST = 1.05
"""What takes at most so many times as long as the fastest is as fast: the rest is chance."""
BUSY_SHARE = 0.1
"""Where others use more than so much of the processors, another count may be the best one once they are gone."""


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """What the processors that this process may use had done at some moment, in seconds that only differences of mean
    something."""

    at_s: float
    busy_s: float
    """Of all these processors together, whoever kept them busy."""
    own_s: float
    """Of this process."""
    processors: int


def candidates(usable: int, cores: int) -> tuple[int, ...]:
    """A thread for each physical core, for half of them, for every processor that may be used, and one alone: each
    count once, in the order in which they are worth measuring.

    `usable` processors may be used, at least 1; the machine has `cores` physical cores.
    """
    wanted = (cores, cores // 2, usable, 1)
    return tuple(dict.fromkeys(min(usable, max(1, count)) for count in wanted))


def as_fast_as_any(times_ms: Mapping[int, float]) -> tuple[int, ...]:
    """The counts of threads with which a step takes no longer than with any other, fewest first.

    `times_ms` are positive, by count, at least one.
    """
    limit_ms = AS_FAST * min(times_ms.values())
    return tuple(sorted(count for count, taken_ms in times_ms.items() if taken_ms <= limit_ms))


def share_of_others(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """The part of the processors, 0 to 1, that others than this process kept busy between two moments; 0 where no time
    lies between them."""
    available_s = (after.at_s - before.at_s) * after.processors
    if available_s <= 0:
        return 0.0
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / available_s))


def stays_the_best(others_share: float) -> bool:
    """Whether a choice that was measured while others used so much of the processors also holds later."""
    return others_share <= BUSY_SHARE
