"""Mixed-integer programs for HiGHS: rows gathered as blocks of arrays, solved once or several times.

highspy is imported when a program is solved, so that importing molink.routing does not load it. The clock of
a time limit is HiGHS's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import BoolArray, FloatArray, IntArray

INFINITY = float("inf")

Entry = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | float]
"""Row, column and value of coefficients, as parallel arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Solution that a solver got to within its time."""

    values: FloatArray | None
    """[columns] of the best solution. None: none was found."""
    bound: float
    """No solution has a lower objective; infinite if there is none."""
    run_s: float
    """Seconds by HiGHS's clock."""

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that there is no solution."""
        return self.values is None and self.bound == INFINITY


@dataclass(slots=True, eq=False)
class Program:
    """Minimise `cost` over columns between 0 and `upper`, those marked `whole` integer, subject to rows."""

    cost: FloatArray
    upper: FloatArray
    whole: BoolArray
    _rows: list[IntArray] = field(default_factory=list)
    _columns: list[IntArray] = field(default_factory=list)
    _values: list[FloatArray] = field(default_factory=list)
    _lower: list[FloatArray] = field(default_factory=list)
    _upper: list[FloatArray] = field(default_factory=list)
    _count: int = 0

    def add_rows(
        self,
        count: int,
        entries: Sequence[Entry],
        lower: npt.NDArray[Any] | float,
        upper: npt.NDArray[Any] | float,
    ) -> None:
        """So many rows, lower <= row <= upper. The rows of entries are counted from 0 in this block; each (row,
        column) is given once."""
        for row, column, value in entries:
            self._rows.append(row.ravel() + self._count)
            self._columns.append(column.ravel())
            self._values.append(np.broadcast_to(np.asarray(value, np.float64), row.shape).ravel())
        self._lower.append(np.broadcast_to(np.asarray(lower, np.float64), count))
        self._upper.append(np.broadcast_to(np.asarray(upper, np.float64), count))
        self._count += count

    def solve(self, time_limit_s: float | None, seed: int = 0) -> Solution:
        """To proven optimality or until the time limit."""
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "integer programs need highspy, which is not installed: pip install 'molink[simnet]'",
                name="highspy",
            ) from error
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("random_seed", seed % 2**31)
        solver.setOptionValue("mip_rel_gap", 0.0)
        if time_limit_s is not None:
            solver.setOptionValue("time_limit", float(time_limit_s))
        solver.passModel(self._model(highspy))
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, INFINITY, solver.getRunTime())
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        return Solution(values, float(info.mip_dual_bound), solver.getRunTime())

    def _model(self, highspy: Any) -> Any:  # noqa: ANN401 (highspy has no types)
        row, column = np.concatenate(self._rows), np.concatenate(self._columns)
        order = np.argsort(row, kind="stable")
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.cost), self._count
        model.col_cost_, model.col_lower_, model.col_upper_ = self.cost, np.zeros(len(self.cost)), self.upper
        model.row_lower_, model.row_upper_ = np.concatenate(self._lower), np.concatenate(self._upper)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[int(whole)] for whole in self.whole]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        begins = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=self._count))))
        matrix.start_, matrix.index_ = begins.astype(np.int32), column[order].astype(np.int32)
        matrix.value_ = np.concatenate(self._values)[order]
        return model
