"""The options of `molink-simnet redundancy`."""

from typing import Annotated

import typer

from molink.simnet.papers.redundancy.cluster.instances import LOCAL_CONNECTIONS
from molink.simnet.papers.redundancy.cluster.workloads import ARRIVALS, WORKLOADS
from molink.simnet.papers.redundancy.run import POLICIES

Device = Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(LOCAL_CONNECTIONS)}.")]
WorkloadName = Annotated[
    str, typer.Option("--workload", metavar="NAME", help=f"One of {', '.join(WORKLOADS)}.")
]
Instances = Annotated[
    str, typer.Option(metavar="NUMBERS", help="Of four accelerators each; several with commas.")
]
Policies = Annotated[str, typer.Option(metavar="NAMES", help=f"With commas: {', '.join(POLICIES)}.")]
Rates = Annotated[
    str | None,
    typer.Option(metavar="RATES", help="Requests a second. Default: up to saturation.", show_default=False),
]
Interconnect = Annotated[
    str | None,
    typer.Option(
        "--interconnect-gbps",
        metavar="GBPS",
        help="From an instance to the others, gigabits a second, several with commas (Figure 10). "
        "Default: the local connection of one accelerator.",
        show_default=False,
    ),
]
Arrivals = Annotated[
    str, typer.Option(metavar="HOW", help=f"{' or '.join(ARRIVALS)}: a second's requests together or not.")
]
SequenceMs = Annotated[
    float,
    typer.Option("--sequence-ms", metavar="MS", help="Of each sequence in a step; 0: a bare roofline."),
]
Duration = Annotated[float, typer.Option(metavar="S", min=1.0, help="Virtual seconds that are measured.")]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="Of lengths, and of Poisson arrivals.")]
