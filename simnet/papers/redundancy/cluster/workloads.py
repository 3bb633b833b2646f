"""Requests as the redundancy paper draws them: uniform lengths (its Table 2), so many in each second."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import floor
from types import MappingProxyType

ARRIVALS = ("burst", "poisson")
"""All of a second's at its beginning, or independently of each other. Section 5.3 speaks of prefill instances that are
active for 0.45 seconds of each second and idle for the rest of it, and of twice as many that halve the time to the
first token: that is so when requests come together."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of prompts and of outputs: any from `least` to `most`, both drawn alike."""

    name: str
    least_tokens: int
    most_tokens: int


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("light", 20, 500),
            Workload("mixed", 20, 1000),
            Workload("heavy", 500, 1000),
        )
    }
)


@dataclass(frozen=True, slots=True)
class RedundancyRequest:
    """What a client asks for."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    """At least two, of which the prefill draws the first. Nobody who schedules knows them before the last has come."""
    room_tokens: int
    """What is set aside for its keys and values: the prompt and the longest output there is."""


TokenCounts = tuple[int, int]
"""Of a prompt and its output."""


def requests(
    workload: Workload | Sequence[TokenCounts], rate_rps: float, duration_s: float, arrivals: str, seed: int
) -> tuple[RedundancyRequest, ...]:
    """In order of arrival. Lengths of the n-th request depend on the seed alone, not on the rate; recorded ones come in
    their order from where the seed says, and round again.

    Raises:
        ValueError: nothing comes, or no arrivals have that name.
    """
    if arrivals not in ARRIVALS:
        raise ValueError(f"--arrivals must be one of {', '.join(ARRIVALS)}, got {arrivals}")
    if not (rate_rps > 0 and duration_s > 0):
        raise ValueError(f"requests need a positive rate and time, got {rate_rps:g}/s for {duration_s:g} s")
    times_s = (_bursts if arrivals == "burst" else _poisson)(rate_rps, duration_s, seed)
    lengths = random.Random(f"{seed} lengths")
    counts: Iterable[TokenCounts]
    if isinstance(workload, Workload):
        least, longest = workload.least_tokens, workload.most_tokens
        counts = ((lengths.randint(least, longest), lengths.randint(least, longest)) for _ in times_s)
    else:
        longest = max(output for _, output in workload)
        counts = islice(cycle(workload), lengths.randrange(len(workload)), None)
    return tuple(
        RedundancyRequest(number, at_s, prompt, output, prompt + longest)
        for number, (at_s, (prompt, output)) in enumerate(zip(times_s, counts, strict=False))
    )


def _bursts(rate_rps: float, duration_s: float, _seed: int) -> list[float]:
    """Over whole seconds; of a fraction of a request, every so many seconds one."""
    return [
        float(second)
        for second in range(floor(duration_s))
        for _ in range(floor((second + 1) * rate_rps) - floor(second * rate_rps))
    ]


def _poisson(rate_rps: float, duration_s: float, seed: int) -> list[float]:
    rng = random.Random(f"{seed} arrivals")
    times_s: list[float] = []
    at_s = rng.expovariate(rate_rps)
    while at_s < duration_s:
        times_s.append(at_s)
        at_s += rng.expovariate(rate_rps)
    return times_s
