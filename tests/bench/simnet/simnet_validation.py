"""The same short scenario in real time (`emulate`) and in virtual time (`serve`), side by side."""

import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from molink.simnet.core.request_load import LengthLimits, RequestOutcome, kept
from molink.simnet.core.traces import bundled_trace
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import QWEN2_7B, ModelShape, even_spans
from molink.simnet.emulate.run import Emulation, EmulationCell, emulate
from molink.simnet.serve.scenario import SOFTWARE_MS, Scenario, SimulatedStage
from molink.simnet.serve.served_as import usual
from molink.simnet.serve.simulated import RequestLoad, simulate_serving

AGREE_WITHIN = 0.10
PEERS, DEVICE = 3, "rtx-4090"


@dataclass(frozen=True, slots=True)
class ValidationLines:
    """The line of each peer, and the way from any to any other."""

    bandwidth_mbps: float = 100.0
    delay_ms: float = 30.0


HOME_LINES = ValidationLines()


@dataclass(frozen=True, slots=True)
class Served:
    """Averages over requests, and what each request saw."""

    ttft_s: float
    tpot_s: float
    throughput_tps: float
    outcomes: tuple[RequestOutcome, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy in both worlds."""

    policy: str
    emulated: Served
    simulated: Served

    @property
    def differences(self) -> dict[str, float]:
        """Of each metric: by which part the simulated value is above the emulated one."""
        return {
            metric: getattr(self.simulated, metric) / getattr(self.emulated, metric) - 1
            for metric in ("ttft_s", "tpot_s", "throughput_tps")
        }


@dataclass(frozen=True, slots=True)
class ValidationLoad:
    """The scenario that both serve."""

    rate_rps: float
    warm_up_s: float
    duration_s: float
    tensors_per_boundary: int
    most_new_tokens: int
    """Longer answers are left out: who is emulated takes as long as they do."""
    seed: int
    lines: ValidationLines = HOME_LINES


def scenario(shape: ModelShape, seed: int, lines: ValidationLines = HOME_LINES) -> Scenario:
    """The circuit in virtual time."""
    stages = tuple(SimulatedStage(DEVICES[DEVICE], span) for span in even_spans(shape.layers, PEERS))
    return Scenario(shape, stages, lines.bandwidth_mbps, lines.delay_ms, SOFTWARE_MS, seed=seed)


def compare(policy: str, load: ValidationLoad) -> Compared:
    """Both, one after the other: the emulated one takes as long as it says."""
    shape = replace(QWEN2_7B, tensors_per_boundary=load.tensors_per_boundary)
    trace = kept(bundled_trace(), LengthLimits(2048, load.most_new_tokens), shape.spec())
    served_as = usual(policy, PEERS)
    emulation = Emulation(
        shape.spec(), DEVICE, load.tensors_per_boundary, PEERS, load.lines.bandwidth_mbps, load.lines.delay_ms, trace,
        load.warm_up_s, load.duration_s, load.seed,
    )  # fmt: skip
    run = asyncio.run(emulate(emulation, EmulationCell(policy, load.rate_rps, served_as), lambda _: None))
    simulated = simulate_serving(
        scenario(shape, load.seed, load.lines),
        policy,
        served_as,
        RequestLoad(trace, load.rate_rps, load.warm_up_s, load.duration_s, load.seed),
    )
    return Compared(
        policy,
        _served(run.outcomes, run.usage.tokens_per_s),
        _served(simulated.outcomes, simulated.throughput_tps),
    )


def report(compared: Sequence[Compared]) -> str:
    """As a table, and what is further apart than AGREE_WITHIN."""
    lines = [
        f"{'policy':<12}{'metric':<16}{'emulated':>10}{'simulated':>11}{'difference':>12}",
    ]
    apart = 0
    for one in compared:
        for metric, difference in one.differences.items():
            values = getattr(one.emulated, metric), getattr(one.simulated, metric)
            apart += abs(difference) > AGREE_WITHIN
            lines.append(
                f"{one.policy:<12}{metric:<16}{values[0]:>10.3f}{values[1]:>11.3f}{100 * difference:>+10.1f} %"
            )
    lines.append(
        f"{apart} of {3 * len(compared)} are more than {100 * AGREE_WITHIN:.0f} % apart; {os.cpu_count()} cores"
    )
    return "\n".join(lines)


def _served(outcomes: Sequence[RequestOutcome], throughput_tps: float) -> Served:
    ended = [one for one in outcomes if one.error is None]
    longer = [one for one in ended if len(one.token_s) > 1]
    return Served(
        statistics.fmean(one.token_s[0] - one.request.arrival_s for one in ended),
        statistics.fmean((one.token_s[-1] - one.token_s[0]) / (len(one.token_s) - 1) for one in longer),
        throughput_tps,
        tuple(outcomes),
    )
