"""`molink-simnet schedule`: circuit searches side by side on the paper's testbeds and on swarms of any size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging, tell
from molink.progress import Progress
from molink.routing import ALGORITHMS, NoCircuit
from molink.simnet.core.matrices import BUNDLED, bundled_matrix, read_matrix
from molink.simnet.papers.scheduling import options
from molink.simnet.papers.scheduling.comparison import Comparison, Row, Setting, compare
from molink.simnet.papers.scheduling.table import schedule_table
from molink.simnet.papers.scheduling.testbeds import GB, LLAMA_2_70B, NOISE, Workload, World
from molink.simnet.papers.scheduling.variants import Variant, in_paper_order, parse_variants
from molink.simnet.presentation.options import LatencyMatrix, Output, parse_counts, parse_names, parse_numbers
from molink.simnet.presentation.pictures import Picture
from molink.simnet.presentation.results import Findings, deliver, output_folder

EXAMPLE = "molink-simnet schedule --testbed all --ilp-limits 4,16 --output results"

LARGEST = {"greedy": 2_000, "ilp": 60, "random": 2_000, "balanced": 2_000}
"""Machines beyond which an algorithm takes minutes or needs a matrix, so that it must be asked for by name."""


def schedule(
    testbed: options.TestbedOption = None,
    machines: options.Machines = None,
    seeds: options.Seeds = 16,
    algorithms: options.Algorithms = None,
    ilp_limits: options.IlpLimits = "4",
    random_samples: options.RandomSamples = "1,64,4096",
    latency_matrix: LatencyMatrix = None,
    layers: options.Layers = LLAMA_2_70B.layers,
    layer_bytes: options.LayerBytes = LLAMA_2_70B.layer_bytes,
    gpu_memory: options.GpuMemory = None,
    noise: options.Noise = NOISE,
    one_way_share: options.OneWayShare = 0.5,
    drawn_places: options.DrawnPlaces = False,
    seed: options.Seed = 0,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Compare searches for circuits.

    Draws problems in the manner of the decentralized-scheduling paper's testbeds, or of a swarm of any size,
    lets each algorithm find a circuit, and shows mean time per output token (TPOT) and mean execution time,
    beside the paper's own (its Tables 3 and 4) where it prints them. Figures are the paper's 5, 6 and 7.
    """
    start_logging(verbose=verbose, debug=debug)
    with _mistakes_of_the_user():
        settings = _settings(testbed, machines)
        variants = _variants(algorithms, machines, ilp_limits, random_samples)
        world = World(
            matrix=bundled_matrix() if latency_matrix is None else read_matrix(latency_matrix),
            gpus=options.parse_gpu_memory(gpu_memory),
            workload=Workload(layers, layer_bytes, LLAMA_2_70B.embed_bytes, LLAMA_2_70B.head_bytes),
            noise=noise,
            one_way_share=one_way_share,
            drawn_places=drawn_places,
        )
        as_in_paper = latency_matrix is None and layers == LLAMA_2_70B.layers and noise == NOISE
        comparison = Comparison(settings, variants, range(seed, seed + seeds), world, as_in_paper=as_in_paper)
        folder = output_folder(output)
        rows = _compared(comparison)
    matrix_name = BUNDLED if latency_matrix is None else str(latency_matrix)
    found = Findings(
        "schedule",
        "Searches for circuits, side by side",
        _parameters(comparison, matrix_name),
        [asdict(row) for row in rows],
        [schedule_table(rows)],
    )
    deliver(found, as_json=as_json, folder=folder, draw=lambda where: _draw(where, comparison, rows))


def _settings(testbed: str | None, machines: int | None) -> tuple[Setting, ...]:
    if machines is None:
        numbers = options.parse_testbeds("1" if testbed is None else testbed)
        return tuple(Setting(number) for number in numbers)
    if testbed is not None:
        raise ValueError("--testbed and --machines exclude each other: a testbed has its own machines")
    return (Setting(machines=machines),)


def _variants(
    algorithms: str | None, machines: int | None, ilp_limits: str, random_samples: str
) -> tuple[Variant, ...]:
    limits_s = {"ilp": parse_numbers("--ilp-limits", ilp_limits)}
    samples = parse_counts("--random-samples", random_samples)
    if algorithms is not None:
        return parse_variants(parse_names("--algorithms", algorithms), ALGORITHMS, limits_s, samples)
    too_much = [
        name
        for name in in_paper_order(ALGORITHMS)
        if (machines or 0) > LARGEST.get(name, options.MOST_MACHINES)
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


def _draw(folder: Path, comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    from molink.simnet.papers.scheduling import figures as schedule_figures

    settings, world = comparison.settings, comparison.world
    examples = [(setting, setting.placement(comparison.seeds[0], world)) for setting in settings]
    return [
        schedule_figures.draw_regions(world.matrix, folder),
        schedule_figures.draw_machines(examples, folder),
        schedule_figures.draw_algorithms(rows, settings, folder),
    ]


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


@contextmanager
def _mistakes_of_the_user() -> Iterator[None]:
    """What cannot be built from the options ends the command with one sentence."""
    try:
        yield
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
