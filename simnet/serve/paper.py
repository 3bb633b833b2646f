"""What the two MoLink papers print of serving, cell by cell, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.simnet.core.serving_times import ServingTimes

VLLM, HELIX, MOLINK, PETALS = "vLLM", "Helix", "MoLink", "Petals"
SYSTEM_OF: Mapping[str, str] = MappingProxyType(
    {
        "concurrent": VLLM,
        "zeromq": HELIX,
        "petals": PETALS,
        "fixed-chunk": MOLINK,
        "paper": MOLINK,
        "molink": MOLINK,
    }
)
"""Whose printed values stand beside a policy's: how that system sends."""


@dataclass(frozen=True, slots=True)
class LineSetting:
    """What differs between the lines of a table."""

    rate_rps: float
    bandwidth_mbps: float
    delay_ms: float
    """One way, from any server to any other."""


Printings = Mapping[tuple[LineSetting, str], ServingTimes]
"""By setting and system."""


def _three(
    setting: LineSetting,
    ttft_s: tuple[float, float, float],
    tpot_s: tuple[float, float, float],
    latency_s: tuple[float, float, float],
) -> dict[tuple[LineSetting, str], ServingTimes]:
    systems = zip((VLLM, HELIX, MOLINK), ttft_s, tpot_s, latency_s, strict=True)
    return {(setting, system): ServingTimes(*times) for system, *times in systems}


TABLE_2: Printings = MappingProxyType(
    {
        **_three(LineSetting(0.7, 100, 30), (17.3, 14.2, 9.29), (3.49, 3.42, 3.01), (509, 497, 449)),
        **_three(LineSetting(0.3, 100, 30), (6.20, 5.66, 5.23), (1.69, 1.65, 1.30), (306, 299, 256)),
        **_three(LineSetting(0.2, 100, 30), (3.74, 3.42, 3.30), (0.50, 0.47, 0.41), (111, 106, 93)),
        **_three(LineSetting(0.1, 100, 30), (3.39, 3.27, 3.23), (0.28, 0.29, 0.26), (74, 75, 69)),
    }
)
"""Table 2 of the transmission paper (section 5.1): Qwen2-7B on three RTX 4090."""

CAPTION_RPS = 0.3
"""The rate that the captions of Tables 3 to 5 name. Their cells at 100 Mbps and 30 ms are Table 2's at 0.2."""

TABLE_3: Printings = MappingProxyType(
    {
        **_three(LineSetting(CAPTION_RPS, 60, 30), (8.07, 7.34, 7.32), (1.24, 1.21, 1.07), (229, 223, 213)),
        **_three(LineSetting(CAPTION_RPS, 100, 30), (3.74, 3.42, 3.30), (0.5, 0.47, 0.41), (111, 106, 93)),
        **_three(LineSetting(CAPTION_RPS, 200, 30), (2.02, 1.86, 1.83), (0.29, 0.28, 0.25), (68, 64, 58)),
        **_three(LineSetting(CAPTION_RPS, 400, 30), (1.45, 1.35, 1.26), (0.25, 0.23, 0.21), (56, 53, 47)),
    }
)
"""Table 3 of the transmission paper: bandwidths."""

TABLE_4: Printings = MappingProxyType(
    {
        **_three(LineSetting(CAPTION_RPS, 100, 10), (3.25, 3.13, 3.12), (0.31, 0.31, 0.27), (72, 72, 63)),
        **_three(LineSetting(CAPTION_RPS, 100, 20), (3.46, 3.28, 3.19), (0.41, 0.40, 0.34), (94, 92, 79)),
        **_three(LineSetting(CAPTION_RPS, 100, 30), (3.74, 3.42, 3.3), (0.5, 0.47, 0.41), (111, 106, 93)),
        **_three(LineSetting(CAPTION_RPS, 100, 50), (3.81, 3.73, 3.7), (0.67, 0.65, 0.59), (143, 139, 127)),
    }
)
"""Table 4 of the transmission paper: delays. MoLink with five micro-batches."""

ABLATION: Mapping[str, ServingTimes] = MappingProxyType(
    {
        "all": ServingTimes(3.30, 0.41, 93.07),
        "chunks": ServingTimes(3.37, 0.44, 99.25),
        "micro-batches": ServingTimes(3.60, 0.43, 97.23),
        "none": ServingTimes(3.56, 0.48, 107.45),
    }
)
"""Table 5 of the transmission paper, by technique: chunked transmission, more micro-batches (five), both, neither."""


def _throughputs(
    setting: LineSetting,
    throughput_tps: tuple[float, float, float],
    ttft_s: tuple[float, float, float],
    tpot_s: tuple[float, float, float],
) -> dict[tuple[LineSetting, str], ServingTimes]:
    systems = zip((PETALS, VLLM, MOLINK), throughput_tps, ttft_s, tpot_s, strict=True)
    return {(setting, system): ServingTimes(ttft, tpot, None, tps) for system, tps, ttft, tpot in systems}


SYSTEM_TABLE_2: Printings = MappingProxyType(
    {
        **_throughputs(
            LineSetting(0.5, 100, 10), (23.438, 89.68, 106.238), (0.261, 0.245, 0.231), (0.116, 0.247, 0.102)
        ),
        **_throughputs(
            LineSetting(1, 100, 10), (45.343, 135.86, 196.142), (0.279, 0.264, 0.243), (0.290, 0.348, 0.255)
        ),
        **_throughputs(
            LineSetting(0.5, 1000, 10), (26.444, 91.65, 111.162), (0.204, 0.177, 0.181), (0.193, 0.168, 0.170)
        ),
        **_throughputs(
            LineSetting(1, 1000, 10), (47.068, 163.95, 207.973), (0.209, 0.180, 0.189), (0.162, 0.198, 0.144)
        ),
        **_throughputs(
            LineSetting(0.5, 10000, 10), (21.332, 92.13, 119.11), (0.200, 0.182, 0.130), (0.097, 0.176, 0.056)
        ),
        **_throughputs(
            LineSetting(1, 10000, 10), (41.878, 215.41, 221.56), (0.199, 0.175, 0.148), (0.107, 0.183, 0.056)
        ),
    }
)
"""Table 2 of the MoLink system paper (section 5.1): Llama-2-7B on two RTX 4090."""
