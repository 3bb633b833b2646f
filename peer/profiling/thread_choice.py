"""Which counts of threads are worth a try on a processor, and which of them is the best by what was measured. Pure.

A decode step reads all weights once: a few threads may use the whole of the memory's bandwidth, and further ones only
wait for each other. A prompt has arithmetic for every core. So decode decides, and where it makes no difference,
prompts do. Cores are not simply counted, because in a container, beside other programs, or with slow cores beside fast
ones, all of them are often slower than some.
"""

from collections.abc import Mapping

AS_FAST = 1.05
"""What takes at most so many times as long as the fastest is as fast: the rest is chance."""


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
