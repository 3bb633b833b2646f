"""`molink-simnet redundancy`: the figures of the redundancy paper (AcceLLM), in virtual time."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType

from molink.client.presentation import console
from molink.client.progress import Progress
from molink.dht.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging, tell
from molink.simnet import redundancy_options as options
from molink.simnet.redundancy.claims import claims
from molink.simnet.redundancy.figures import draw_redundancy
from molink.simnet.redundancy.instances import LOCAL_CONNECTIONS, SEQUENCE_MS, instance_profile
from molink.simnet.redundancy.rows import PAIR_POLICIES, redundancy_rows
from molink.simnet.redundancy.run import POLICIES, Cell, Run, simulate
from molink.simnet.redundancy.tables import claims_table, redundancy_table
from molink.simnet.redundancy.workloads import ARRIVALS, WORKLOADS
from molink.simnet.results import output_folder, result_document, write_json

EXAMPLE = "molink-simnet redundancy --device h100 --workload mixed --instances 4 --output results"
INSTANCES = (4, 8, 16)
"""As the paper has them: multiples of four, of which two pairs are one group while memory is short."""
LEAST_REQUESTS = 10
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
    device: options.Device = "h100",
    workload: options.WorkloadName = "mixed",
    instances: options.Instances = "4",
    policies: options.Policies = "vllm,splitwise,accellm,molink",
    rates: options.Rates = None,
    interconnect_gbps: options.Interconnect = None,
    arrivals: options.Arrivals = "burst",
    sequence_ms: options.SequenceMs = SEQUENCE_MS,
    duration: options.Duration = 60.0,
    warm_up: options.WarmUp = 20.0,
    seed: options.Seed = 0,
    jobs: options.Jobs = None,
    output: options.Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve Llama-2-70B on instances that hold keys and values twice, and on those that do not.

    Who prefills, who decodes what and which copy is made next are the decisions of `molink.peer`; time is virtual.
    Shows cost efficiency (tokens a second and instance), times to the first token (TTFT), between tokens (TBT) and
    of the whole request (JCT) and memory, and beside them what the paper's text says.
    """
    start_logging(verbose=verbose, debug=debug)
    try:
        profile = instance_profile(device, sequence_ms)
        gbps = LOCAL_CONNECTIONS[device].bytes_per_s * 8 / 1e9
        one = Cell("", device, workload, 4, 1.0, gbps, warm_up, duration, arrivals, sequence_ms, seed)
        cells = _cells(one, _instances(instances), _policies(policies), rates, interconnect_gbps)
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = None if output is None else output_folder(output)
    rows = redundancy_rows(_all_runs(cells, jobs or os.cpu_count() or 1))
    found = claims(rows)
    document = result_document("redundancy", _parameters(cells), [asdict(row) for row in rows])
    document["claims"] = [asdict(one) for one in found]
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        console().print(redundancy_table(rows))
        console().print(claims_table(found))
    if folder is not None:
        _write(folder, document, lambda: draw_redundancy(rows, profile, folder))


def _cells(
    one: Cell, instances: Sequence[int], policies: Sequence[str], rates: str | None, lines: str | None
) -> list[Cell]:
    """Those of a table, which are like `one` but for these."""
    if one.workload not in WORKLOADS or one.arrivals not in ARRIVALS:
        raise ValueError(
            f"--workload must be one of {', '.join(WORKLOADS)} and --arrivals one of {', '.join(ARRIVALS)}"
        )
    given = None if rates is None else _numbers("--rates", rates)
    lines_gbps = (one.interconnect_gbps,) if lines is None else _numbers("--interconnect-gbps", lines)
    cells = [
        replace(one, policy=policy, instances=number, rate_rps=rate, interconnect_gbps=gbps)
        for number in instances
        for rate, gbps, policy in product(
            given or [each * number for each in RATES[one.device, one.workload]], lines_gbps, policies
        )
    ]
    if min(cell.rate_rps for cell in cells) * one.duration_s < LEAST_REQUESTS:
        raise ValueError(f"--rates and --duration must let {LEAST_REQUESTS} requests come to be averaged")
    return cells


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option} must be positive numbers with commas between them, got {text!r}")
    return found


def _instances(text: str) -> tuple[int, ...]:
    names = {str(number): number for number in INSTANCES}
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(name in names for name in chosen):
        raise ValueError(f"--instances must be 4, 8 or 16, several with commas between them, got {text!r}")
    return tuple(names[name] for name in chosen)


def _policies(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    if not chosen or not all(name in POLICIES for name in chosen):
        raise ValueError(f"--policies must be of {', '.join(POLICIES)}, got {text!r}")
    return chosen


def _all_runs(cells: Sequence[Cell], jobs: int) -> list[Run]:
    """As many at a time as there are jobs. A process each: they only compute."""
    found: dict[int, Run] = {}
    with Progress() as progress:
        progress.begin(f"0 of {len(cells)} cells")
        for number, run in _finished(cells, jobs):
            found[number] = run
            progress.report(f"{len(found)} of {len(cells)} cells")
    return [found[number] for number in range(len(cells))]


def _finished(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[int, Run]]:
    if jobs == 1 or len(cells) == 1:
        for number, cell in enumerate(cells):
            yield number, simulate(cell)
        return
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=get_context("spawn")) as pool:
        longest_first = sorted(
            range(len(cells)), key=lambda at: (cells[at].policy not in PAIR_POLICIES, -cells[at].rate_rps)
        )
        running = {pool.submit(simulate, cells[at]): at for at in longest_first}
        for done in as_completed(running):
            yield running[done], done.result()


def _write(folder: Path, document: dict[str, object], draw: Callable[[], Sequence[Path]]) -> None:
    try:
        written = draw()
        write_json(folder / "result.json", document)
    except OSError as error:
        raise CommandFailed(
            f"the results cannot be written to {folder}: {error.strerror or error}"
        ) from error
    tell(f"wrote result.json and {len(written)} files of figures to {folder}")


def _parameters(cells: Sequence[Cell]) -> dict[str, object]:
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
