"""Tables 3 and 4 of the MoLink system paper as data, with the prices of their captions."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.simnet.papers.cost.margins import Owned, Rented, implied_cost_per_hour
from molink.simnet.serve.paper import MOLINK, PETALS, VLLM


@dataclass(frozen=True, slots=True)
class PrintedMargin:
    """A cell: what a system made, and what the paper says that it earned."""

    throughput_tps: float
    margin: float


@dataclass(frozen=True, slots=True)
class PrintedCosts:
    """A table: the machines of each system and their cells, by a line's name."""

    token_price: float
    """Of a million output tokens."""
    currency: str
    machines: Mapping[str, Owned | Rented]
    cells: Mapping[tuple[str, str], PrintedMargin]

    def implied_cost_per_hour(self, system: str) -> float:
        """The median over its cells of the cost from which the printed margin follows."""
        return statistics.median(
            implied_cost_per_hour(cell.throughput_tps, self.token_price, cell.margin)
            for (_, name), cell in self.cells.items()
            if name == system
        )


def _cells(
    systems: tuple[str, str, str], *lines: tuple[str, tuple[float, float, float], tuple[float, float, float]]
) -> Mapping[tuple[str, str], PrintedMargin]:
    return MappingProxyType(
        {
            (line, system): PrintedMargin(tps, percent / 100)
            for line, throughputs, percents in lines
            for system, tps, percent in zip(systems, throughputs, percents, strict=True)
        }
    )


_TWO_4090 = Owned(devices=2, device_price=12999, years=5, power_w=450, power_price_per_kwh=0.538)
TABLE_3 = PrintedCosts(
    token_price=1.8,
    currency="yuan",
    machines=MappingProxyType(dict.fromkeys((PETALS, VLLM, MOLINK), _TWO_4090)),
    cells=_cells(
        (PETALS, VLLM, MOLINK),
        ("100 Mbps, 0.5/s", (23.438, 89.68, 106.238), (-80.3, -24.5, -10.6)),
        ("100 Mbps, 1/s", (45.343, 135.86, 196.142), (-61.8, 14.3, 65.1)),
        ("1 Gbps, 0.5/s", (26.444, 91.65, 111.162), (-77.7, -22.9, -6.5)),
        ("1 Gbps, 1/s", (47.068, 163.95, 207.973), (-60.4, 38.0, 75.0)),
        ("10 Gbps, 0.5/s", (21.332, 92.13, 105.687), (-82.0, -22.5, -11.1)),
        ("10 Gbps, 1/s", (41.878, 215.41, 221.56), (-64.8, 81.3, 86.5)),
    ),
)
"""Llama-2-7B on two RTX 4090 at home. Its Table 2 has 119.11 tokens/s where this one has 105.687."""

H20, A100, FOUR_4090 = "S1: vLLM, H20-96GB", "S2: vLLM, A100-80GB", "S3: MoLink, 4 x RTX 4090"
TABLE_4 = PrintedCosts(
    token_price=2.75,
    currency="USD",
    machines=MappingProxyType({H20: Rented(1, 1.05), A100: Rented(1, 1.16), FOUR_4090: Rented(4, 0.26)}),
    cells=_cells(
        (H20, A100, FOUR_4090),
        ("1/s", (193.39, 185.66, 149.61), (82, 53, 31)),
        ("3/s", (426.31, 461.79, 442.15), (302, 281, 287)),
        ("5/s", (264.97, 606.48, 737.74), (150, 400, 546)),
        ("6/s", (279.28, 604.94, 854.78), (163, 399, 648)),
        ("7/s", (429.6, 594.58, 927.36), (305, 391, 711)),
        ("8/s", (405.1, 342.85, 909.16), (282, 183, 696)),
    ),
)
"""Llama-2-70B in AWQ on machines of a cloud."""

COST_TABLES: Mapping[str, PrintedCosts] = MappingProxyType({"3": TABLE_3, "4": TABLE_4})
