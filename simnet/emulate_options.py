"""The options of `molink-simnet emulate`, and what their texts mean."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from molink.peer.circulation import RULES, rule_named
from molink.peer.transmission.policies import POLICIES
from molink.simnet.model_shapes import MODEL_SHAPES
from molink.simnet.named_devices import CHOICES

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
        help=f"{', '.join(RULES)} or a number. Default: that of the system that a policy stands for.",
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
WarmUp = Annotated[
    float,
    typer.Option("--warm-up", metavar="S", min=0.0, help="Before that: requests that are not measured."),
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
Tensors = Annotated[
    int,
    typer.Option(
        "--tensors-per-boundary",
        metavar="N",
        min=1,
        max=2,
        help="Tensors that peers send for each row; vLLM 0.7.2 sends hidden states and residual, so 2.",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help=f"What timed peers are: {CHOICES}.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv",
        help="arrival_s,prompt_tokens,generated_tokens of each request. Default: conversations from Azure.",
        show_default=False,
    ),
]
MostPrompt = Annotated[
    int, typer.Option("--max-prompt-tokens", metavar="N", min=1, help="Longer prompts are left out.")
]
MostNew = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longer answers are left out.")
]
Seed = Annotated[
    int, typer.Option(metavar="S", min=0, help="Where in the trace to begin, and what prompts say.")
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write result.json, and the figure as .csv and .png, there."),
]


def parse_policies(text: str) -> tuple[str, ...]:
    """Names of policies, each once; raises ValueError with one sentence."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if not names or unknown:
        raise ValueError(f"--policy must be of {', '.join(POLICIES)}, got {', '.join(unknown) or 'none'}")
    return names


def parse_micro_batches(text: str | None) -> str | None:
    """The same text, of a rule or number that there is; raises ValueError with one sentence."""
    if text is not None:
        try:
            rule_named(text)
        except ValueError as error:
            raise ValueError(f"--micro-batches: {error}") from error
    return text


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests a second, each once; raises ValueError with one sentence."""
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--rate must be numbers with commas between them, got {text!r}") from None
    for rate in rates:
        require_positive("--rate", rate)
    return rates


def require_positive(option: str, value: float) -> None:
    """Raises ValueError with one sentence unless the value is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{option} must be above 0 and finite, got {value:g}")


def require_not_negative(option: str, value: float) -> None:
    """Raises ValueError with one sentence unless the value is 0 or more, and finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{option} must be 0 or more and finite, got {value:g}")
