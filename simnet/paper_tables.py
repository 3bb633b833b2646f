"""What the papers print, as far as our commands print the same, by our names of rows and columns."""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Averages over requests, in seconds."""

    ttft_s: float
    tpot_s: float
    latency_s: float


def _serving(rate_rps: float, *columns: tuple[float, float, float]) -> dict[tuple[float, str], ServingTimes]:
    """One line of the table: TTFT, TPOT and latency, each by vLLM, Helix and MoLink."""
    systems = ("vLLM", "Helix", "MoLink")
    return {
        (rate_rps, system): ServingTimes(*times)
        for system, times in zip(systems, zip(*columns, strict=True), strict=True)
    }


SERVING_BANDWIDTH_MBPS, SERVING_DELAY_MS, SERVING_PEERS = 100.0, 30.0, 3
SERVING: Mapping[tuple[float, str], ServingTimes] = MappingProxyType(
    {
        **_serving(0.7, (17.3, 14.2, 9.29), (3.49, 3.42, 3.01), (509.0, 497.0, 449.0)),
        **_serving(0.3, (6.20, 5.66, 5.23), (1.69, 1.65, 1.30), (306.0, 299.0, 256.0)),
        **_serving(0.2, (3.74, 3.42, 3.30), (0.50, 0.47, 0.41), (111.0, 106.0, 93.0)),
        **_serving(0.1, (3.39, 3.27, 3.23), (0.28, 0.29, 0.26), (74.0, 75.0, 69.0)),
    }
)
"""Table 2 of the transmission paper (section 5.1), by requests a second and system: Qwen2-7B on three RTX 4090."""
SYSTEM_OF_POLICY: Mapping[str, str] = MappingProxyType(
    {"concurrent": "vLLM", "zeromq": "Helix", "paper": "MoLink", "molink": "MoLink"}
)
"""Whose numbers in that table stand beside a policy's: how that system sends (section 5, baselines)."""
