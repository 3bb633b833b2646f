"""The options of `molink-simnet serve`."""

from typing import Annotated

import typer

from molink.simnet.presentation.options import MICRO_BATCHES
from molink.simnet.serve.output.paper_figures import FIGURES
from molink.simnet.serve.paper import SYSTEM_OF
from molink.simnet.serve.presets import PRESETS
from molink.simnet.serve.sweep import QUANTITIES

PresetName = Annotated[
    str, typer.Option("--preset", metavar="NAME", help=f"Which table: {', '.join(PRESETS)}.")
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"These instead of the table's, with commas: {', '.join(SYSTEM_OF)}.",
        show_default=False,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=VALUES",
        help=f"Values of one of {', '.join(QUANTITIES)}, such as rate=0.1,0.2; again for all combinations with "
        "another. What is not swept is as in the middle of the paper's tables, or as other options say. "
        "micro-batches: numbers or rules; chunk: tokens of a prompt in a step, or computed: heads choose.",
        show_default=False,
    ),
]
FigureNames = Annotated[
    str | None,
    typer.Option(
        "--figure",
        metavar="NAMES",
        help=f"Draw only these into --output: {', '.join(FIGURES)} or all. They come with every table, too.",
        show_default=False,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="RATES", help="Requests a second, with commas, instead of the table's.", show_default=False
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth-mbps", metavar="MBPS", help="Of each uplink, instead of the table's.", show_default=False
    ),
]
Delay = Annotated[
    str | None,
    typer.Option("--delay-ms", metavar="MS", help="One way, instead of the table's.", show_default=False),
]
Peers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Machines instead of the table's.", show_default=False)
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        "--micro-batches", metavar="RULE", help=f"For every policy: {MICRO_BATCHES}.", show_default=False
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        metavar="TOKENS",
        min=1,
        help="Prompts are computed in such steps, for every policy.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="As for emulate, instead of the table's.", show_default=False),
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Instead of the table's.", show_default=False)
]
Software = Annotated[
    float,
    typer.Option("--software-ms", metavar="MS", help="What taking in a message costs beside its way."),
]
Duration = Annotated[float, typer.Option(metavar="S", min=0.1, help="Virtual seconds that are measured.")]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="Where in the trace to begin.")]
