"""Assignment problem: each row gets a column of its own at the least total cost. Pure."""

import numpy as np

from molink.routing.arrays import FloatArray, IntArray


def assign(cost: FloatArray) -> tuple[int, ...]:
    """The column of each row, all different, such that the costs add up to as little as possible.

    Rows are taken up one after another; each finds the cheapest way to a free column over columns whose owners move
    on, at prices that keep those of the rows before optimal (Crouse, "On implementing 2D rectangular assignment
    algorithms", IEEE Transactions on Aerospace and Electronic Systems 52(4), 2016, section IV).

    Raises:
        ValueError: there are more rows than columns, or a cost is not finite.
    """
    rows, columns = cost.shape
    if rows > columns:
        raise ValueError(f"{rows} rows cannot have a column each of {columns}")
    if not np.isfinite(cost).all():
        raise ValueError("every cost must be finite")
    row_prices, column_prices = np.zeros(rows), np.zeros(columns)
    owners: IntArray = np.full(columns, -1)
    for row in range(rows):
        _take(row, cost, row_prices, column_prices, owners)
    taken = np.flatnonzero(owners >= 0)
    return tuple(taken[np.argsort(owners[taken])].tolist())


def _take(
    row: int, cost: FloatArray, row_prices: FloatArray, column_prices: FloatArray, owners: IntArray
) -> None:
    """Gives the row a column; prices and owners are changed."""
    columns = cost.shape[1]
    way, came_from = np.full(columns, np.inf), np.full(columns, -1)
    seen = np.zeros(columns, dtype=np.bool_)
    at, length, column = row, 0.0, -1
    while at >= 0:
        through = length + cost[at] - row_prices[at] - column_prices
        shorter = ~seen & (through < way)
        way[shorter], came_from[shorter] = through[shorter], at
        column = int(np.argmin(np.where(seen, np.inf, way)))
        length, at = float(way[column]), int(owners[column])
        seen[column] = True
    passed = np.flatnonzero(seen & (owners >= 0))
    row_prices[row] += length
    row_prices[owners[passed]] += length - way[passed]
    column_prices[passed] -= length - way[passed]
    while True:
        mover = int(came_from[column])
        before = np.flatnonzero(owners == mover)
        owners[column] = mover
        if mover == row:
            return
        column = int(before[0])
