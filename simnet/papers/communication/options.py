"""The options of `molink-simnet communication`."""

from typing import Annotated

import typer

from molink.routing.parallelism.layout_prediction import Goal
from molink.simnet.devices.named_devices import CHOICES as DEVICES
from molink.simnet.papers.communication.fabric import CHOICES as NETWORKS

Model = Annotated[str, typer.Option(metavar="NAME", help="Any model of `serve`, such as llama-2-13b.")]
Tensor = Annotated[int, typer.Option("--tp", metavar="T", min=1, help="Ranks that share each layer.")]
Pipeline = Annotated[int, typer.Option("--pp", metavar="P", min=1, help="Stages that share the layers.")]
Prefill = Annotated[int, typer.Option(metavar="S", min=1, help="Tokens of the prompt.")]
Decode = Annotated[int, typer.Option(metavar="S", min=1, help="Tokens generated.")]
Device = Annotated[str, typer.Option(metavar="NAME", help=f"Of every rank: {DEVICES}.")]
Network = Annotated[str, typer.Option(metavar="NAME", help=f"Between ranks: {NETWORKS}.")]
SimulatedTokens = Annotated[
    int | None,
    typer.Option(
        "--simulated-tokens",
        metavar="N",
        min=0,
        help="Count messages of so many tokens only, 0: of none. Default: of all.",
        show_default=False,
    ),
]
Advise = Annotated[bool, typer.Option("--advise", help="Compare all layouts instead of describing one.")]
Devices = Annotated[int, typer.Option(metavar="N", min=1, max=64, help="With --advise: at most so many.")]
GoalOption = Annotated[Goal, typer.Option("--goal", help="With --advise: what is to be short.")]
MostTtft = Annotated[
    float | None,
    typer.Option(
        "--max-ttft-ms",
        metavar="MS",
        min=0.0,
        help="With --advise: layouts later than that come last.",
        show_default=False,
    ),
]
