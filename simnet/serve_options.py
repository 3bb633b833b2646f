"""The options of `molink-simnet serve`."""

from pathlib import Path
from typing import Annotated

import typer

from molink.simnet.serve_presets import PRESETS

PresetName = Annotated[
    str, typer.Option("--preset", metavar="NAME", help=f"Which table: {', '.join(PRESETS)}.")
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Only these of the table's policies, with commas.", show_default=False
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(metavar="RATES", help="Requests a second instead of the table's.", show_default=False),
]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth-mbps", metavar="MBPS", help="Instead of the table's.", show_default=False),
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
        "--micro-batches", metavar="RULE", help="For every policy: a rule or a number.", show_default=False
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option("--prefill-chunk", metavar="TOKENS", min=1, help="For every policy.", show_default=False),
]
Tensors = Annotated[
    int,
    typer.Option(
        "--tensors-per-boundary", metavar="N", min=1, max=2, help="2: as vLLM 0.7.2 sends; ours sends 1."
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
WarmUp = Annotated[
    float, typer.Option("--warm-up", metavar="S", min=0.0, help="Virtual seconds before that.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv", help="As for emulate. Default: conversations from Azure.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="Where in the trace to begin.")]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Cells at a time. Default: one a processor.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write result.json, figures and tables there.", show_default=False),
]
