"""Load balancing of a circuit's hops: how fast its machines are as a pipeline, and how to even them out."""

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.circuit import Hop
from molink.routing.problem.greedy_fill import GreedyFill
from molink.routing.problem.problem import CircuitProblem, tpot_ms

_HALVINGS = 40
"""Times that the range of the slowest hop's time is halved: to a millionth of a millionth of it."""


class PipelineStages:
    """Times of a pipeline's stages. A stage is a hop's computation, with embedding and head; links only delay."""

    def __init__(self, problem: CircuitProblem) -> None:
        self._problem = problem
        self._stops: IntArray = GreedyFill(problem).every_greedy_stop().T
        self._spent: FloatArray = np.zeros((problem.machines, problem.layers + 1))
        np.cumsum(problem.layer_ms, axis=1, out=self._spent[:, 1:])
        self._embed_ms = np.zeros(problem.machines) if problem.embed_ms is None else problem.embed_ms
        self._head_ms = np.zeros(problem.machines) if problem.head_ms is None else problem.head_ms

    def slowest_ms(self, hops: tuple[Hop, ...]) -> float:
        """Milliseconds of the slowest stage."""
        return max(self._stage_ms(hop) for hop in hops)

    def rate(self, hops: tuple[Hop, ...]) -> float:
        """Tokens per second with as many micro-batches as keep the slowest stage busy."""
        slowest = self.slowest_ms(hops)
        return 1000.0 / slowest if slowest > 0 else float("inf")

    def even(self, machines: tuple[int, ...], max_tpot_ms: float) -> tuple[Hop, ...] | None:
        """Hops on the machines in this order whose slowest stage is as quick as it can be; None if they do not fit.

        Machines may be left out. Reaching as far as a limit on the stage allows is never a disadvantage for the
        machines that follow, so the limit is found by halving. Where the TPOT would be too high, the limit is
        raised until it is not: fewer hops, or more layers where they take less time.
        """
        low, high = 0.0, float(self._spent[list(machines), -1].max()) * 2 + self._ends_ms(machines)
        best = self._within(machines, high)
        if best is None or tpot_ms(self._problem, best) > max_tpot_ms:
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self._within(machines, middle)
            if found is None or tpot_ms(self._problem, found) > max_tpot_ms:
                low = middle
            else:
                best, high = found, self.slowest_ms(found)
            if high - low <= 1e-12 * high:
                break
        return best

    def _within(self, machines: tuple[int, ...], limit_ms: float) -> tuple[Hop, ...] | None:
        """Each machine as many layers as it has memory and time for; None if that is not the whole model."""
        hops: list[Hop] = []
        layer, layers = 0, self._problem.layers
        for machine in machines:
            if layer == layers:
                break
            spent = self._spent[machine]
            until = spent[layer] + limit_ms - (self._embed_ms[machine] if layer == 0 else 0.0)
            timely = int(np.searchsorted(spent, until, side="right")) - 1
            stop = min(int(self._stops[machine, layer]), timely)
            if stop == layers and spent[layers] + self._head_ms[machine] > until:
                stop -= 1
            if stop > layer:
                hops.append(Hop(machine, layer, stop))
                layer = stop
        return tuple(hops) if layer == layers else None

    def _stage_ms(self, hop: Hop) -> float:
        time = float(self._spent[hop.machine, hop.stop] - self._spent[hop.machine, hop.start])
        time += float(self._embed_ms[hop.machine]) if hop.start == 0 else 0.0
        return time + (float(self._head_ms[hop.machine]) if hop.stop == self._problem.layers else 0.0)

    def _ends_ms(self, machines: tuple[int, ...]) -> float:
        rows = list(machines)
        return float(self._embed_ms[rows].max() + self._head_ms[rows].max())
