"""The options of `molink-peer`, each with its help."""

from pathlib import Path
from typing import Annotated

import typer

StateFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the peer's identity and caches.")
]

Model = Annotated[
    str | None,
    typer.Option(metavar="ID_OR_PATH", help="Model to serve: without it, the one that the swarm needs most."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="What the swarm is to call the model: without it, what --model says, a path too."
    ),
]
MeasuredModel = Annotated[str, typer.Option("--model", metavar="ID_OR_PATH", help="Model to measure with.")]
NewSwarm = Annotated[bool, typer.Option("--new-swarm", help="Found a new swarm.")]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="10GB",
        help="Cap on weights, KV cache and work space together; the program itself takes some 0.6 GB more.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda:0|cuda:0,1|mps",
        help="Where to compute: several GPUs share every layer, if that is predicted to be faster.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="auto|float32|bfloat16|float16", help="Numbers to compute in: auto is the model's."),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="none|int8|nf4", help="How weights are held: without it, as in the swarm that is joined."
    ),
]
Exact = Annotated[
    str | None,
    typer.Option(
        metavar="on|off",
        help="On: one session's numbers are bit for bit transformers', and slower; off, unless told.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST", help="Address to listen on: this machine only, unless the swarm is on others."
    ),
]
Announce = Annotated[str | None, typer.Option(metavar="HOST", help="Address that others dial.")]
Port = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=65535, help="Control plane's port: any free one, remembered."),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=65535, help="Data plane's port: any free one, remembered."),
]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="What others see this peer called.")]
Layers = Annotated[
    str | None, typer.Option(metavar="A:B", help="Hold exactly the layers from A up to, not including, B.")
]
Partner = Annotated[
    str | None, typer.Option(metavar="auto|off|PEER_ID", help="Who keeps a second copy of the KV cache.")
]
HttpProxy = Annotated[
    str | None, typer.Option(metavar="URL", help="HTTP proxy that links to peers are dialled through.")
]
TransmissionPolicy = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What leaves this machine first: molink, or a rival to measure."),
]
StoreFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of weights that come from a hub; peers share it.")
]
SwapSpace = Annotated[
    str | None,
    typer.Option(
        metavar="8GB",
        help="With a GPU: the host's memory for sessions that wait while others take its KV cache.",
    ),
]
StoreSize = Annotated[
    str | None,
    typer.Option(metavar="100GB", help="Cap on that folder: without it, half of what the disk has free."),
]
Relay = Annotated[
    str | None,
    typer.Option(
        metavar="auto|on|off",
        help="Being reached over other peers' relays: auto, if nobody can dial this one; on, always; off, never.",
    ),
]
RelayPort = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=65535,
        help="Port of this peer's own relay, if others can dial it: any free one.",
    ),
]
OfferRelay = Annotated[
    str | None,
    typer.Option(
        metavar="auto|off|MBPS",
        help="What it passes on for peers that nobody can dial: auto is a tenth of the uplink, at most 20 Mbps.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=65535, help="Serve /metrics for Prometheus to this machine; 0: any free port."
    ),
]
ActivationCodec = Annotated[
    str | None,
    typer.Option(
        metavar="none|auto|float16|bfloat16|int8",
        help="Fewer bytes on links, less exact, for sessions that ask for it: auto is any of them.",
    ),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        metavar="molink|system|transmission|N",
        help="How many micro-batches circulate where this peer is the head: a rule, or a number.",
    ),
]
PauseWhenBusy = Annotated[
    str | None,
    typer.Option(
        metavar="auto|on|off",
        help="Pause while a full-screen or GPU-heavy program runs: auto is if this peer uses a GPU.",
    ),
]
QuietHours = Annotated[
    list[str] | None,
    typer.Option(metavar="22:00-07:00", help="Serve nobody in this part of the day; may be given again."),
]
OnBattery = Annotated[
    str | None, typer.Option(metavar="pause|serve", help="What to do while the machine is on battery.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Threads of a processor: without it or OMP_NUM_THREADS, as many as are fastest.",
    ),
]
Priority = Annotated[
    str | None,
    typer.Option(metavar="normal|low", help="Low, unless told: this machine's other programs go first."),
]
Wait = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=604_800,
        help="Keep trying to reach the initial peers for so long, if they start later: 0, unless told.",
    ),
]
LeaveNow = Annotated[
    bool, typer.Option("--now", help="Leave at once: sessions that run are cut off, and go on elsewhere.")
]
