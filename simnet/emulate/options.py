"""The options of `molink-simnet emulate`."""

from typing import Annotated, Literal

import typer

from molink.peer.wire.transmission.policies import POLICIES
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.devices.named_devices import CHOICES
from molink.simnet.presentation.options import MICRO_BATCHES

COMPARED = "concurrent,zeromq,paper,molink"
"""What is compared if nobody says otherwise: the transmission paper's two baselines, its own, and ours."""
MOST_PEERS = 16
"""Each is a process of its own on this machine."""

Compute = Literal["timed", "real"]

Peers = Annotated[int, typer.Option(metavar="N", min=1, max=MOST_PEERS, help="Peer processes, one circuit.")]
Bandwidth = Annotated[float, typer.Option("--bandwidth-mbps", metavar="MBPS", help="Uplink of every peer.")]
Delay = Annotated[float, typer.Option("--delay-ms", metavar="MS", help="From peer to peer, one way.")]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help=f"How peers send, one after the other, with commas: {', '.join(POLICIES)}."
    ),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        "--micro-batches",
        metavar="RULE",
        help=f"{MICRO_BATCHES}. Default: that of the system that a policy stands for.",
        show_default=False,
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        metavar="TOKENS",
        min=1,
        help="Cut prompts into such steps. Default: whole prompts, but molink's heads choose.",
        show_default=False,
    ),
]
Rate = Annotated[str, typer.Option(metavar="RATES", help="Requests a second; several with commas.")]
Duration = Annotated[
    float,
    typer.Option(metavar="S", min=0.1, help="So long requests come that are measured; the paper has 1800."),
]
ComputeOption = Annotated[
    Compute,
    typer.Option(help="timed: peers take the time of --device; real: they compute, on this machine."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"timed: {', '.join(MODEL_SHAPES)}; real: any model, by default the bundled one.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help=f"What timed peers are: {CHOICES}.")]
MostPrompt = Annotated[
    int, typer.Option("--max-prompt-tokens", metavar="N", min=1, help="Longer prompts are left out.")
]
MostNew = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longer answers are left out.")
]
Seed = Annotated[
    int, typer.Option(metavar="S", min=0, help="Where in the trace to begin, and what prompts say.")
]
