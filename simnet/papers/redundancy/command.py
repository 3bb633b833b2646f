"""`molink-simnet redundancy`: the figures of the redundancy paper (AcceLLM), in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from molink.peer.device.device import processor_count
from molink.simnet.core.matrices import read_matrix
from molink.simnet.core.request_load import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, LengthLimits, kept
from molink.simnet.core.traces import read_trace
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.papers.redundancy.claims import claims
from molink.simnet.papers.redundancy.cluster.instances import LOCAL_CONNECTIONS, SEQUENCE_MS, instance_profile
from molink.simnet.papers.redundancy.cluster.workloads import ARRIVALS, WORKLOADS, TokenCounts
from molink.simnet.papers.redundancy.figures import redundancy_figures
from molink.simnet.papers.redundancy.rows import PAIR_POLICIES, redundancy_rows
from molink.simnet.papers.redundancy.run import POLICIES, RedundancyCell, simulate
from molink.simnet.papers.redundancy.tables import claims_table, redundancy_table
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import (
    Jobs,
    WarmUp,
    option,
    parse_counts,
    parse_names,
    parse_numbers,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.parallel_runs import run_all
from molink.simnet.presentation.results import Findings

EXAMPLE = "molink-simnet redundancy --device h100 --workload mixed --instances 4 --output results"
INSTANCES = (4, 8, 16)
"""As the paper has them: multiples of four, of which two pairs are one group while memory is short."""
LEAST_REQUESTS = 10
TRACE = "trace"
"""The workload of a table whose requests are as long as those of a trace."""
RATES: Mapping[tuple[str, str], tuple[float, ...]] = MappingProxyType(
    {
        ("h100", "light"): (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        ("h100", "mixed"): (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
        ("h100", "heavy"): (0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
        ("910b2", "light"): (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        ("910b2", "mixed"): (0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
        ("910b2", "heavy"): (0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    }
)
"""Requests a second for each instance, up to more than any policy serves."""


def redundancy(
    device: Annotated[str, option(f"One of {', '.join(LOCAL_CONNECTIONS)}.", "NAME")] = "h100",
    workload: Annotated[str, option(f"One of {', '.join(WORKLOADS)}.", "NAME")] = "mixed",
    instances: Annotated[str, option("Of four accelerators each; several with commas.", "NUMBERS")] = "4",
    policies: Annotated[
        str, option(f"With commas: {', '.join(POLICIES)}.", "NAMES")
    ] = "vllm,splitwise,accellm,molink",
    rates: Annotated[str | None, option("Requests a second. Default: up to saturation.", "RATES")] = None,
    interconnect_gbps: Annotated[
        str | None,
        option(
            "From an instance to the others, gigabits a second, several with commas (Figure 10). "
            "Default: the local connection of one accelerator.",
            "GBPS",
        ),
    ] = None,
    arrivals: Annotated[
        str, option(f"{' or '.join(ARRIVALS)}: a second's requests together or not.", "HOW")
    ] = "burst",
    sequence_ms: Annotated[
        float, option("Of each sequence in a step; 0: a bare roofline.", "MS")
    ] = SEQUENCE_MS,
    duration: Annotated[float, option("Virtual seconds that are measured.", "S", least=1.0)] = 60.0,
    warm_up: WarmUp = 20.0,
    latency_matrix: Annotated[
        Path | None, option("Checked; changes nothing here: instances stand in one room.", "FILE.csv")
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            f"Lengths of prompts and outputs from here, to {MOST_PROMPT_TOKENS} and {MOST_NEW_TOKENS} tokens; rates "
            "stay those of --workload. Default: drawn as --workload says.",
            "FILE.csv",
        ),
    ] = None,
    seed: Annotated[
        int, option("Of lengths, of where in a trace to begin, and of Poisson arrivals.", "S", least=0)
    ] = 0,
    jobs: Jobs = None,
) -> Run:
    """Serve with keys and values held twice.

    Llama-2-70B on instances that hold them twice, and on those that do not, as in the redundancy paper. Who prefills,
    who decodes what and which copy is made next are the decisions of `molink.peer`; time is virtual. Shows cost
    efficiency (tokens a second and instance), times to the first token (TTFT), between tokens (TBT) and of the whole
    request (JCT) and memory, and beside them what the paper's text says.
    """
    require_positive("--duration", duration)
    require_not_negative("--warm-up", warm_up)
    require_not_negative("--sequence-ms", sequence_ms)
    profile = instance_profile(device, sequence_ms)
    gbps = LOCAL_CONNECTIONS[device].bytes_per_s * 8 / 1e9
    one = RedundancyCell("", device, workload, 4, 1.0, gbps, warm_up, duration, arrivals, sequence_ms, seed)
    chosen = parse_names("--policies", policies, POLICIES)
    cells = _cells(one, _instances(instances), chosen, rates, interconnect_gbps)
    if latency_matrix is not None:
        read_matrix(latency_matrix)
    if trace is not None:
        recorded = _recorded(trace, profile.shape)
        cells = [replace(cell, workload=TRACE, recorded=recorded) for cell in cells]
    files = {
        "latency_matrix": None if latency_matrix is None else str(latency_matrix),
        "trace": None if trace is None else str(trace),
    }

    def run(_: Path | None) -> Findings:
        runs = run_all(simulate, cells, jobs or processor_count(), weight=_weight, name="redundancy")
        rows = redundancy_rows(runs)
        agreed = claims(rows)
        return Findings(
            "redundancy",
            f"Llama-2-70B on instances of 4 x {device}, {cells[0].workload} workload: redundant KV caches",
            _parameters(cells) | files,
            rows,
            [redundancy_table(rows), claims_table(agreed)],
            more={"claims": [asdict(one) for one in agreed]},
            figures=lambda: redundancy_figures(rows, profile),
        )

    return run


def _recorded(trace: Path, shape: ModelShape) -> tuple[TokenCounts, ...]:
    """Lengths of a trace's requests, as far as they are within the limits; an output has two tokens at least."""
    requests = kept(read_trace(trace), LengthLimits(), shape.spec())
    return tuple((one.prompt_tokens, max(2, one.generated_tokens)) for one in requests)


def _cells(
    one: RedundancyCell,
    instances: Sequence[int],
    policies: Sequence[str],
    rates: str | None,
    lines: str | None,
) -> list[RedundancyCell]:
    """Those of a table, which are like `one` but for these."""
    for name, given, known in (
        ("--workload", one.workload, WORKLOADS),
        ("--arrivals", one.arrivals, ARRIVALS),
    ):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    chosen = None if rates is None else parse_numbers("--rates", rates)
    lines_gbps = (one.interconnect_gbps,) if lines is None else parse_numbers("--interconnect-gbps", lines)
    cells = [
        replace(one, policy=policy, instances=number, rate_rps=rate, interconnect_gbps=gbps)
        for number in instances
        for rate, gbps, policy in product(
            chosen or [each * number for each in RATES[one.device, one.workload]], lines_gbps, policies
        )
    ]
    if min(cell.rate_rps for cell in cells) * one.duration_s < LEAST_REQUESTS:
        raise ValueError(f"--rates and --duration must let {LEAST_REQUESTS} requests come to be averaged")
    return cells


def _instances(text: str) -> tuple[int, ...]:
    chosen = parse_counts("--instances", text)
    if not set(chosen) <= set(INSTANCES):
        raise ValueError(f"--instances must be 4, 8 or 16, several with commas between them, got {text!r}")
    return chosen


def _weight(cell: RedundancyCell) -> float:
    """Whoever keeps copies takes longest."""
    return cell.rate_rps * (10.0 if cell.policy in PAIR_POLICIES else 1.0)


def _parameters(cells: Sequence[RedundancyCell]) -> dict[str, object]:
    """What it takes to run the same again."""
    first = cells[0]
    return {
        "device": first.device,
        "workload": first.workload,
        "instances": list(dict.fromkeys(cell.instances for cell in cells)),
        "policies": list(dict.fromkeys(cell.policy for cell in cells)),
        "rates_rps": list(dict.fromkeys(cell.rate_rps for cell in cells)),
        "interconnect_gbps": list(dict.fromkeys(cell.interconnect_gbps for cell in cells)),
        "arrivals": first.arrivals,
        "sequence_ms": first.sequence_ms,
        "warm_up_s": first.warm_up_s,
        "duration_s": first.duration_s,
        "seed": first.seed,
    }
