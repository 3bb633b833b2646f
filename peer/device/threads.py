"""How many threads a processor computes with: what its owner says, else what is measured to be fastest."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch

from molink.peer.device.device import processor_count
from molink.peer.device.thread_choice import ProcessorTimes, as_fast_as_any, candidates

ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What torch heeds; whoever sets one of them has decided."""
TURNS = 3
"""Counts are measured in turns, so that a busy moment meets all of them; the fastest time of each counts."""
STEPS_IN_TURN = 4
"""The first only wakes the threads."""
TURNS_BUDGET_S = 1.0
"""No count is begun after this long; one that was never measured is not chosen."""

_NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})
"""Of a processor's times; those of guests are part of others."""

Step = Callable[[], float]
"""Runs a step and returns its milliseconds."""


def counts_to_try(
    device: str, given: int | None, environment: Mapping[str, str] | None = None
) -> tuple[int, ...]:
    """The counts of threads among which measurements decide; only one where the owner has decided.

    `given` is the owner's, on the command line. Where a GPU computes, threads stay as torch has them.
    """
    environment = os.environ if environment is None else environment
    if given is not None:
        return (given,)
    if device != "cpu" or any(environment.get(name) for name in ENVIRONMENT):
        return (torch.get_num_threads(),)
    usable = processor_count()
    return candidates(usable, psutil.cpu_count(logical=False) or usable)


def use_fastest(counts: Sequence[int], decode: Step, prompt: Step) -> int:
    """Has torch compute with the count of threads that is fastest, and returns it.

    A decode step and part of a prompt are measured, the latter only if the former does not decide. The count holds on
    this thread, and on others that compute for the first time afterwards. Blocks.
    """
    remaining = tuple(counts)
    for step in (decode, prompt):
        if len(remaining) > 1:
            remaining = as_fast_as_any(_measured_ms(remaining, step))
    torch.set_num_threads(remaining[0])
    return remaining[0]


def processor_times() -> ProcessorTimes:
    """What the processors that this process may use have done so far."""
    process = psutil.Process()
    times = psutil.cpu_times(percpu=True)
    affinity = getattr(process, "cpu_affinity", None)  # not on macOS
    bound = [times[index] for index in affinity() if index < len(times)] if affinity is not None else []
    busy_s = sum(
        seconds for one in bound or times for name, seconds in one._asdict().items() if name not in _NOT_BUSY
    )
    own = process.cpu_times()
    return ProcessorTimes(time.perf_counter(), busy_s, own.user + own.system, len(bound or times))


def _measured_ms(counts: Sequence[int], step: Step) -> dict[int, float]:
    deadline_s = time.perf_counter() + TURNS_BUDGET_S
    measured: dict[int, float] = {}
    for _ in range(TURNS):
        for count in counts:
            if measured and time.perf_counter() > deadline_s:
                return measured
            torch.set_num_threads(count)
            taken_ms = min([step() for _ in range(STEPS_IN_TURN)][1:])
            measured[count] = min(taken_ms, measured.get(count, taken_ms))
    return measured
