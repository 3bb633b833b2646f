"""Profiles that are measured in as little time as can be, and on a clock of their own."""

from collections.abc import Callable, Sequence

import pytest

from molink.peer.profiling import layer_bench, profiler
from molink.peer.profiling.layer_bench import LayerBench
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

BUDGETS = ("TOTAL_BUDGET_S", "SIZE_BUDGET_S", "CONTEXT_BUDGET_S", "PIECE_BUDGET_S", "PREFILL_BUDGET_S")
StepCost = Callable[[Span, Sequence[SequenceCache], int], float]
"""Seconds of a step of so many tokens of each sequence through these layers."""


def measure_briefly(monkeypatch: pytest.MonkeyPatch, *but: str) -> None:
    """What is measured has no time beyond its first steps, but for the budgets that are named."""
    for budget in BUDGETS:
        if budget not in but:
            monkeypatch.setattr(layer_bench, budget, 0.0)


class StandingClock:
    """The time of a machine that stands still, but for what `pass_s` says: however busy this one is, a profile is the
    same."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        """A microsecond later each time."""
        self._now_s += 1e-6
        return self._now_s

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds


def stop_the_clock(monkeypatch: pytest.MonkeyPatch, cost: StepCost | None = None) -> StandingClock:
    """Benches measure on the clock that is returned from now on, on which a step takes its cost."""
    clock = StandingClock()
    for module in (profiler, layer_bench):
        monkeypatch.setattr(module, "time", clock)
    if cost is not None:
        original = LayerBench._step  # noqa: SLF001

        def step(
            bench: LayerBench, span: Span, caches: Sequence[SequenceCache], count: int, want_logits: bool
        ) -> None:
            clock.pass_s(cost(span, caches, count))
            original(bench, span, caches, count, want_logits)

        monkeypatch.setattr(LayerBench, "_step", step)
    return clock
