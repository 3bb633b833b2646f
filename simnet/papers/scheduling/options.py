"""The options of `molink-simnet schedule`, and what their texts mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from molink.simnet.papers.scheduling.testbeds import GB, GPUS, TESTBEDS, Gpu

MOST_MACHINES = 10_000

TestbedOption = Annotated[
    str | None,
    typer.Option(
        "--testbed",
        metavar="1|2|3|4|all",
        help="Testbed of the paper; several with commas. Default: 1.",
        show_default=False,
    ),
]
Machines = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MOST_MACHINES,
        help=f"Instead of a testbed: so many machines at homes all over the world, at most {MOST_MACHINES:,}.",
    ),
]
Seeds = Annotated[int, typer.Option(metavar="K", min=1, help="Problems to average over, one for each seed.")]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="The first of the seeds.")]
Algorithms = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated, such as greedy,augmented,refined,ilp,random,balanced; a number sets seconds "
        "(ilp16, refined0.1) or, for random, permutations (random64). Default: all that suit the size.",
        show_default=False,
    ),
]
IlpLimits = Annotated[
    str, typer.Option(metavar="SECONDS", help="Time limits of ilp, comma-separated; the paper has 4,16.")
]
RandomSamples = Annotated[
    str, typer.Option(metavar="COUNTS", help="Permutations that random tries, comma-separated.")
]
Layers = Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Layers of the model.")]
LayerBytes = Annotated[int, typer.Option(metavar="BYTES", min=0, help="Weights of a layer.")]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        metavar="GPU=GB,...",
        help="Memory of each kind of machine in GB. Default: A100=80,RTX3090=24,A10g=24.",
        show_default=False,
    ),
]
Noise = Annotated[
    float, typer.Option(metavar="SD", min=0.0, max=1.0, help="Standard deviation of a link's random factor.")
]
OneWayShare = Annotated[
    float,
    typer.Option(
        metavar="PART", min=0.0, max=1.0, help="Part of a round trip that a link takes; 0.5 is half of it."
    ),
]
DrawnPlaces = Annotated[
    bool,
    typer.Option(
        "--drawn-places",
        help="Let each machine of a testbed draw its region, instead of spreading them evenly.",
    ),
]


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
