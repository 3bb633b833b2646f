"""Disjoint circuits over many machines: repeated search among what is left, then pairs of circuits are cut anew.

A heuristic: the problem contains bin packing. How far it may be from the optimum is for `flow.py` to bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.circuits.balancing import PipelineStages
from molink.routing.plan import plan_circuit
from molink.routing.problem.circuit import Circuit, Hop, NoCircuit
from molink.routing.problem.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.problem.span_options import most_layers

_WHOLE = 40
"""Machines up to which a search looks at all that are left; beyond, at the surroundings of one machine."""
_SLACK = 2.0
"""Surroundings have memory for so many times the model: room to choose, and few enough to search quickly."""
_NEIGHBOURS = 3
"""Circuits near a circuit that are cut anew together with it."""
_SPARES = 6
"""Machines in no circuit that take part when a pair of circuits is cut anew."""


def find_among(problem: CircuitProblem, machines: Sequence[int] | IntArray) -> Circuit | None:
    """The circuit that the search finds among some machines, in terms of the whole problem; None without one."""
    rows = np.asarray(machines, dtype=np.int64)
    try:
        found = plan_circuit(problem.subset(rows))
    except NoCircuit:
        return None
    return replace(found, hops=tuple(Hop(int(rows[hop.machine]), hop.start, hop.stop) for hop in found.hops))


@dataclass(slots=True, eq=False)
class DisjointCircuits:
    """Disjoint circuits of a high total rate: a greedy packing, then local search.

    `searches` bounds how often `improve` searches.
    """

    problem: CircuitProblem
    pipelined: bool
    """Whether a circuit's rate is that of its slowest hop; else one token at a time goes around."""
    max_tpot_ms: float
    searches: int
    _stages: PipelineStages = field(init=False)
    _most: IntArray = field(init=False)
    _links: FloatArray = field(init=False)
    _apart: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self._stages = PipelineStages(self.problem)
        self._most = most_layers(self.problem)
        self._links = self.problem.dense_latency_ms
        self._apart = self._links + self._links.T

    def rate(self, circuits: Iterable[Circuit]) -> float:
        """Tokens per second of all together."""
        return float(sum(self._stages.rate(one.hops) if self.pipelined else rate(one) for one in circuits))

    def pack(
        self, machines: Iterable[int], slack: float = _SLACK, *, outermost_first: bool = False
    ) -> list[Circuit]:
        """Disjoint circuits among the machines, until no further one is found."""
        left = np.array(sorted(machines), dtype=np.int64)
        order = self._seeds(left, outermost_first=outermost_first)
        circuits: list[Circuit] = []
        failures = 0
        while len(left) and self._most[left].sum() >= self.problem.layers and failures < _NEIGHBOURS:
            found = self._next(left, order, slack)
            if found is None:
                failures += 1
                order = order[1:]
                if len(left) <= _WHOLE or not len(order):
                    break
                continue
            failures = 0
            circuits.append(found)
            used = [hop.machine for hop in found.hops]
            left, order = left[~np.isin(left, used)], order[~np.isin(order, used)]
        return self._absorb(circuits, left.tolist()) if self.pipelined else circuits

    def improve(self, circuits: list[Circuit]) -> list[Circuit]:
        """Cuts circuits that are near each other anew, together with spare machines, while that raises the rate."""
        circuits = self._joined(circuits) if self.pipelined else circuits
        tried: set[frozenset[tuple[Hop, ...]]] = set()
        changed = True
        while changed and self.searches > 0:
            changed = False
            for pair in self._pairs(circuits):
                key = frozenset(one.hops for one in pair)
                if key in tried or not all(one in circuits for one in pair):
                    continue
                tried.add(key)
                better = self._cut_anew(pair, self._spare(circuits))
                if better is not None:
                    circuits = [one for one in circuits if one not in pair] + better
                    changed = True
                if self.searches <= 0:
                    break
        return circuits

    def _joined(self, circuits: list[Circuit]) -> list[Circuit]:
        """Makes one circuit of two while that raises the rate: with fewer layers each, machines whose memory is small
        for their speed have more to do."""
        changed = True
        while changed:
            changed = False
            for pair in self._pairs(circuits):
                if len(pair) == 1 or not all(one in circuits for one in pair):
                    continue
                found = self._evened(tuple(hop.machine for one in pair for hop in one.hops))
                if found is not None and self.rate((found,)) > self.rate(pair) * (1 + 1e-9):
                    circuits = [*(one for one in circuits if one not in pair), found]
                    changed = True
        return circuits

    def _find(self, machines: IntArray) -> Circuit | None:
        """Within the TPOT limit, and evened out if the rate is that of the slowest hop."""
        self.searches -= 1
        found = find_among(self.problem, machines)
        if found is None or found.tpot_ms > self.max_tpot_ms:
            return None
        return self._evened(tuple(hop.machine for hop in found.hops)) or found if self.pipelined else found

    def _evened(self, machines: tuple[int, ...]) -> Circuit | None:
        hops = self._stages.even(machines, self.max_tpot_ms)
        return (
            None if hops is None else Circuit(hops, tpot_ms(self.problem, hops), load_ms(self.problem, hops))
        )

    def _next(self, left: IntArray, order: IntArray, slack: float) -> Circuit | None:
        if len(left) <= _WHOLE:
            return self._find(left)
        nearest = left[np.argsort(self._apart[order[0], left], kind="stable")]
        held = np.cumsum(self._most[nearest])
        wanted = slack * self.problem.layers
        while True:
            count = min(len(left), int(np.searchsorted(held, wanted)) + 1)
            found = self._find(nearest[:count])
            if found is not None or count == len(left) or wanted > 8 * self.problem.layers:
                return found
            wanted *= 2

    def _seeds(self, machines: IntArray, *, outermost_first: bool) -> IntArray:
        """Machines by how far around them one model's memory reaches; quick machines in quick company first."""
        if len(machines) <= _WHOLE:
            return machines
        apart = np.sort(self._apart[np.ix_(machines, machines)], axis=1)
        typical = max(1, int(np.ceil(self.problem.layers / max(1.0, float(self._most[machines].mean())))))
        reach = apart[:, : 2 * typical].mean(axis=1) * typical / 2
        pace = self.problem.layer_ms[machines].mean(axis=1) * self.problem.layers
        order = np.argsort(reach + pace, kind="stable")
        return machines[order[::-1] if outermost_first else order]

    def _pairs(self, circuits: list[Circuit]) -> list[tuple[Circuit, ...]]:
        """Each circuit alone and with its nearest, the slowest first."""
        slowest = sorted(circuits, key=lambda one: -one.tpot_ms)
        pairs: list[tuple[Circuit, ...]] = []
        rows = [np.array([hop.machine for hop in one.hops]) for one in slowest]
        for index, one in enumerate(slowest):
            pairs.append((one,))
            apart = [
                (float(self._apart[np.ix_(rows[index], row)].min()), other)
                for other, row in enumerate(rows)
                if other != index
            ]
            pairs += [(one, slowest[other]) for _, other in sorted(apart)[:_NEIGHBOURS]]
        return pairs

    def _spare(self, circuits: list[Circuit]) -> IntArray:
        used = [hop.machine for one in circuits for hop in one.hops]
        return np.flatnonzero((self._most > 0) & ~np.isin(np.arange(self.problem.machines), used))

    def _cut_anew(self, pair: tuple[Circuit, ...], spare: IntArray) -> list[Circuit] | None:
        """Circuits of a higher rate on the machines of the pair and the nearest spare ones; None without any.

        The quickest first and then what is left; and again with one machine of the quickest kept for the rest.
        """
        own = [hop.machine for one in pair for hop in one.hops]
        rows = np.array(own, dtype=np.int64)
        nearest = np.argsort(self._apart[np.ix_(rows, spare)].min(axis=0), kind="stable")
        machines = [*own, *spare[nearest[:_SPARES]].tolist()]
        best, best_rate = None, self.rate(pair) * (1 + 1e-9)
        first = self._find(np.array(sorted(machines)))
        if first is None:
            return None
        for kept in (None, *(hop.machine for hop in first.hops)):
            if kept is not None and self.searches <= 0:
                break
            start = first if kept is None else self._find(np.array(sorted(set(machines) - {kept})))
            if start is None:
                continue
            left = set(machines) - {hop.machine for hop in start.hops}
            found = (
                self._absorb([start, *self.pack(left)], left) if self.pipelined else [start, *self.pack(left)]
            )
            if self.rate(found) > best_rate:
                best, best_rate = found, self.rate(found)
        return best

    def _absorb(self, circuits: list[Circuit], spare: Iterable[int]) -> list[Circuit]:
        """Puts spare machines where they take load off a circuit's slowest hop, the fastest machines first."""
        used = {hop.machine for one in circuits for hop in one.hops}
        waiting = [machine for machine in spare if machine not in used and self._most[machine] > 0]
        circuits = list(circuits)
        for machine in sorted(waiting, key=lambda each: float(self.problem.layer_ms[each].mean())):
            gains = []
            for index in self._nearest(circuits, machine):
                found = self._evened(self._inserted(circuits[index], machine))
                if found is not None:
                    gains.append((self.rate((found,)) - self.rate((circuits[index],)), -index, found))
            if gains and (best := max(gains, key=lambda gain: gain[:2]))[0] > 0:
                circuits[-best[1]] = best[2]
        return circuits

    def _nearest(self, circuits: list[Circuit], machine: int) -> list[int]:
        apart = [float(self._apart[machine, [hop.machine for hop in one.hops]].min()) for one in circuits]
        return sorted(range(len(circuits)), key=lambda index: apart[index])[: _NEIGHBOURS + 1]

    def _inserted(self, circuit: Circuit, machine: int) -> tuple[int, ...]:
        """The circuit's machines with one more, where it is the least detour."""
        order = [hop.machine for hop in circuit.hops]
        after = order[1:] + order[:1]
        links = self._links
        detour = links[order, machine] + links[machine, after] - links[order, after]
        place = int(np.argmin(detour)) + 1
        return (*order[:place], machine, *order[place:])


def rate(circuit: Circuit) -> float:
    """Tokens per second if one token at a time goes around."""
    return 1000.0 / circuit.tpot_ms if circuit.tpot_ms > 0 else float("inf")
