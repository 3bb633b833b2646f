"""The options of `molink-simnet swarm`."""

from pathlib import Path
from typing import Annotated

import typer

from molink.simnet.devices.model_shapes import MODEL_SHAPES

MOST_PEERS = 10_000

Peers = Annotated[
    int, typer.Option(metavar="N", min=1, max=MOST_PEERS, help=f"Volunteers, at most {MOST_PEERS:,}.")
]
Hours = Annotated[float, typer.Option(metavar="H", help="Virtual hours in which requests come.")]
Gateways = Annotated[
    int, typer.Option(metavar="G", min=1, max=1000, help="Gateways, which take requests in turns.")
]
Rate = Annotated[float, typer.Option(metavar="RPS", help="Requests a second, of all gateways together.")]
ChurnHours = Annotated[
    float,
    typer.Option(
        "--churn", metavar="H", help="Hours that a volunteer stays, on average; 0: nobody comes or goes."
    ),
]
CrashShare = Annotated[
    float,
    typer.Option("--crash-share", metavar="PART", help="The part of volunteers that goes without a word."),
]
Model = Annotated[str, typer.Option(metavar="NAME", help=f"Which model: {', '.join(MODEL_SHAPES)}.")]
FromSnapshot = Annotated[
    Path | None,
    typer.Option(
        "--from-snapshot",
        metavar="FILE",
        help="Instead of drawn volunteers: a swarm as `molink-peer status --json` prints it; layers are as large "
        "as those of --model.",
        show_default=False,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without", metavar="PEER", help="What if this peer of the snapshot leaves.", show_default=False
    ),
]
BandwidthFactor = Annotated[
    float | None,
    typer.Option(
        "--bandwidth-factor",
        metavar="F",
        help="What if every line of the snapshot carries so many times as much.",
        show_default=False,
    ),
]
Partner = Annotated[
    str,
    typer.Option(
        "--partner",
        metavar="auto|off",
        help="Whether another peer keeps a second copy of each hop's KV cache and takes its place when it is lost. "
        "Off, as in this version's peers, which keep no copies yet.",
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="S", min=0, help="The same seed, the same swarm, the same numbers.")
]
