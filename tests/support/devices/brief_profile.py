"""Profiles that are measured in as little time as can be, for tests that look at something else."""

import pytest

from molink.peer.profiling import layer_bench

BUDGETS = ("TOTAL_BUDGET_S", "SIZE_BUDGET_S", "CONTEXT_BUDGET_S", "PIECE_BUDGET_S", "PREFILL_BUDGET_S")


def measure_briefly(monkeypatch: pytest.MonkeyPatch, *but: str) -> None:
    """What is measured has no time beyond its first steps, but for the budgets that are named."""
    for budget in BUDGETS:
        if budget not in but:
            monkeypatch.setattr(layer_bench, budget, 0.0)
