"""What the decentralized-scheduling paper prints, by our names of rows and columns."""

from collections.abc import Mapping
from types import MappingProxyType

_COLUMNS = ("greedy", "augmented", "ilp4", "ilp16", "random1", "random64", "random4096")


def _table(columns: tuple[str, ...], *rows: tuple[float, ...]) -> Mapping[tuple[int, str], float]:
    return MappingProxyType(
        {
            (testbed, column): value
            for testbed, row in enumerate(rows, start=1)
            for column, value in zip(columns, row, strict=True)
        }
    )


TPOT_MS = _table(
    _COLUMNS,
    (224.12, 225.41, 277.38, 225.44, 1142.98, 418.34, 266.29),
    (172.71, 173.31, 259.01, 177.40, 1166.57, 407.67, 204.10),
    (185.47, 185.74, 202.69, 187.59, 1052.52, 418.44, 217.09),
    (416.03, 419.84, 873.06, 495.93, 1696.72, 885.53, 608.59),
)
"""Table 3 of the decentralized-scheduling paper (section 5.2): average TPOT in milliseconds over 16 seeds."""

EXECUTION_S = _table(
    tuple(column for column in _COLUMNS if column != "random1"),
    (0.098, 0.005, 4.465, 13.750, 0.009, 0.560),
    (0.506, 0.017, 6.153, 17.123, 0.009, 0.579),
    (0.093, 0.005, 4.463, 11.270, 0.009, 0.565),
    (0.856, 0.034, 4.490, 16.525, 0.010, 0.584),
)
"""Its Table 4: average execution time in seconds."""
