"""`molink-simnet schedule`: circuit searches side by side on the paper's testbeds and on swarms of any size."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from molink.commands import EXIT_USAGE, CommandFailed, tell
from molink.progress import Progress
from molink.routing import ALGORITHMS, NoCircuit
from molink.simnet.core.matrices import BUNDLED, bundled_matrix, read_matrix
from molink.simnet.core.traces import read_trace
from molink.simnet.papers.scheduling.comparison import Comparison, Row, SearchSetting, compare
from molink.simnet.papers.scheduling.figures import schedule_figures
from molink.simnet.papers.scheduling.testbeds import (
    GB,
    GPUS,
    LLAMA_2_70B,
    NOISE,
    TESTBEDS,
    Gpu,
    ModelSizes,
    World,
)
from molink.simnet.papers.scheduling.variants import Variant, in_paper_order, parse_variants
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import (
    LatencyMatrix,
    option,
    parse_counts,
    parse_names,
    parse_numbers,
)
from molink.simnet.presentation.results import Findings
from molink.simnet.presentation.tables import Column, Table

EXAMPLE = "molink-simnet schedule --testbed all --ilp-limits 4,16 --output results"

MOST_MACHINES = 10_000
LARGEST = {"greedy": 2_000, "ilp": 60, "random": 2_000, "balanced": 2_000}
"""Machines beyond which an algorithm takes minutes or needs a matrix, so that it must be asked for by name."""


def schedule(
    testbed: Annotated[
        str | None, option("Testbed of the paper; several with commas. Default: 1.", "1|2|3|4|all")
    ] = None,
    machines: Annotated[
        int | None,
        option(
            f"Instead of a testbed: so many machines at homes all over the world, at most {MOST_MACHINES:,}.",
            "N",
            least=1,
            most=MOST_MACHINES,
        ),
    ] = None,
    seeds: Annotated[int, option("Problems to average over, one for each seed.", "K", least=1)] = 16,
    algorithms: Annotated[
        str | None,
        option(
            "Comma-separated, such as greedy,augmented,refined,ilp,random,balanced; a number sets seconds "
            "(ilp16, refined0.1) or, for random, permutations (random64). Default: all that suit the size.",
            "NAMES",
        ),
    ] = None,
    latency_matrix: LatencyMatrix = None,
    ilp_limits: Annotated[
        str, option("Time limits of ilp, comma-separated; the paper has 4,16.", "SECONDS")
    ] = "4",
    random_samples: Annotated[
        str, option("Permutations that random tries, comma-separated.", "COUNTS")
    ] = "1,64,4096",
    layers: Annotated[int, option("Layers of the model.", "N", least=1, most=1000)] = LLAMA_2_70B.layers,
    layer_bytes: Annotated[int, option("Weights of a layer.", "BYTES", least=0)] = LLAMA_2_70B.layer_bytes,
    gpu_memory: Annotated[
        str | None,
        option("Memory of each kind of machine in GB. Default: A100=80,RTX3090=24,A10g=24.", "GPU=GB,..."),
    ] = None,
    noise: Annotated[
        float, option("Standard deviation of a link's random factor.", "SD", least=0.0, most=1.0)
    ] = NOISE,
    one_way_share: Annotated[
        float,
        option("Part of a round trip that a link takes; 0.5 is half of it.", "PART", least=0.0, most=1.0),
    ] = 0.5,
    drawn_places: Annotated[
        bool,
        option(
            "Let each machine of a testbed draw its region, instead of spreading them evenly.",
            None,
            "--drawn-places",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        option(
            "Checked; changes nothing here: a circuit is searched for one decode step, whatever requests come.",
            "FILE.csv",
        ),
    ] = None,
    seed: Annotated[int, option("The first of the seeds.", "S", least=0)] = 0,
) -> Run:
    """Compare searches for circuits.

    Draws problems in the manner of the decentralized-scheduling paper's testbeds, or of a swarm of any size,
    lets each algorithm find a circuit, and shows mean time per output token (TPOT) and mean execution time,
    beside the paper's own (its Tables 3 and 4) where it prints them. Figures are the paper's 5, 6 and 7.
    """
    settings = _settings(testbed, machines)
    if trace is not None:
        read_trace(trace)
    variants = _variants(algorithms, machines, ilp_limits, random_samples)
    world = World(
        matrix=bundled_matrix() if latency_matrix is None else read_matrix(latency_matrix),
        gpus=parse_gpu_memory(gpu_memory),
        workload=ModelSizes(layers, layer_bytes, LLAMA_2_70B.embed_bytes, LLAMA_2_70B.head_bytes),
        noise=noise,
        one_way_share=one_way_share,
        drawn_places=drawn_places,
    )
    as_in_paper = latency_matrix is None and layers == LLAMA_2_70B.layers and noise == NOISE
    comparison = Comparison(settings, variants, range(seed, seed + seeds), world, as_in_paper=as_in_paper)
    matrix_name = BUNDLED if latency_matrix is None else str(latency_matrix)

    def run(_: Path | None) -> Findings:
        rows = _compared(comparison)
        return Findings(
            "schedule",
            "Searches for circuits, side by side",
            _parameters(comparison, matrix_name) | {"trace": None if trace is None else str(trace)},
            rows,
            [schedule_table(rows)],
            figures=lambda: schedule_figures(comparison, rows),
        )

    return run


def schedule_table(rows: Sequence[Row]) -> Table:
    """A line for each row, settings apart; the paper's averages stand beside ours where it prints them."""
    seeds = rows[0].seeds
    unsolved = any(row.solved < row.seeds for row in rows)
    columns = (
        Column("algorithm", "algorithm"),
        Column("TPOT", "tpot_ms", "ms", ".2f", printed="paper_tpot_ms"),
        Column("95 % interval", lambda row: _interval(row) if seeds > 1 else None, "ms"),
        Column("machines\nused", "hops", form=".1f"),
        Column("execution", "execution_s", "s", ".4f", printed="paper_execution_s", printed_form=".3f"),
        Column("solved\nproblems", lambda row: f"{row.solved} of {row.seeds}" if unsolved else None),
    )
    title = f"Circuit search: means over {'one problem' if seeds == 1 else f'{seeds} problems'} a setting"
    by = Column("setting", lambda row: SearchSetting(row.testbed, row.machines).name)
    return Table(title, columns, rows, by=(by,))


def _interval(row: Row) -> str | None:
    return None if row.tpot_low_ms is None else f"{row.tpot_low_ms:.0f} to {row.tpot_high_ms:.0f}"


def _settings(testbed: str | None, machines: int | None) -> tuple[SearchSetting, ...]:
    if machines is None:
        numbers = parse_testbeds("1" if testbed is None else testbed)
        return tuple(SearchSetting(number) for number in numbers)
    if testbed is not None:
        raise ValueError("--testbed and --machines exclude each other: a testbed has its own machines")
    return (SearchSetting(machines=machines),)


def _variants(
    algorithms: str | None, machines: int | None, ilp_limits: str, random_samples: str
) -> tuple[Variant, ...]:
    limits_s = {"ilp": parse_numbers("--ilp-limits", ilp_limits)}
    samples = parse_counts("--random-samples", random_samples)
    if algorithms is not None:
        return parse_variants(parse_names("--algorithms", algorithms), ALGORITHMS, limits_s, samples)
    too_much = [
        name for name in in_paper_order(ALGORITHMS) if (machines or 0) > LARGEST.get(name, MOST_MACHINES)
    ]
    if too_much:
        tell(
            f"left out, too much for so many machines: {', '.join(too_much)} (--algorithms has them all the same)"
        )
    names = [name for name in in_paper_order(ALGORITHMS) if name not in too_much]
    return parse_variants(names, ALGORITHMS, limits_s, samples)


def _compared(comparison: Comparison) -> list[Row]:
    with Progress() as progress:
        progress.begin("Searching circuits")
        try:
            return compare(comparison, progress.report)
        except (NoCircuit, TimeoutError) as error:
            raise CommandFailed(str(error)) from error
        except ValueError as error:  # a setting that cannot be built, or is too large for an algorithm
            raise CommandFailed(str(error), EXIT_USAGE) from error


def _parameters(comparison: Comparison, matrix_name: str) -> dict[str, object]:
    """What it takes to run the same again."""
    world = comparison.world
    testbeds = [setting.testbed for setting in comparison.settings if setting.testbed is not None]
    return {
        "testbeds": testbeds or None,
        "machines": None if testbeds else comparison.settings[0].machines,
        "seeds": len(comparison.seeds),
        "seed": comparison.seeds.start,
        "algorithms": [variant.label for variant in comparison.variants],
        "latency_matrix": matrix_name,
        "noise": world.noise,
        "one_way_share": world.one_way_share,
        "drawn_places": world.drawn_places,
        "layers": world.workload.layers,
        "layer_bytes": world.workload.layer_bytes,
        "gpu_memory_gb": {name: gpu.memory_bytes / GB for name, gpu in world.gpus.items()},
    }


def parse_testbeds(text: str) -> tuple[int, ...]:
    """Numbers of testbeds, each once; raises ValueError with one sentence."""
    if text.strip() == "all":
        return tuple(TESTBEDS)
    known = {str(number): number for number in TESTBEDS}
    names = [name.strip() for name in text.split(",")]
    if not known.keys() >= set(names):
        raise ValueError(
            f"--testbed must be 1, 2, 3, 4 or all, several with commas between them, got {text!r}"
        )
    return tuple(dict.fromkeys(known[name] for name in names))


def parse_gpu_memory(text: str | None) -> Mapping[str, Gpu]:
    """The kinds of machines with the memory given for some of them; raises ValueError with one sentence."""
    kinds = {_plain(name): name for name in GPUS}
    gpus = dict(GPUS)
    for part in filter(None, (text or "").split(",")):
        name, _, amount = part.partition("=")
        kind = kinds.get(_plain(name))
        if kind is None:
            raise ValueError(f"--gpu-memory names {name.strip()!r}: the testbeds have {', '.join(GPUS)}")
        try:
            gigabytes = float(amount)
        except ValueError:
            raise ValueError(f"--gpu-memory must be like A100=40, got {part!r}") from None
        if not 0 <= gigabytes <= GB:
            raise ValueError(f"--gpu-memory of {kind} must be gigabytes, 0 or more, got {amount.strip()}")
        gpus[kind] = replace(gpus[kind], memory_bytes=int(gigabytes * GB))
    return gpus


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()
