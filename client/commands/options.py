"""The options of `molink` and `molink-gateway`, each with its help."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(
        metavar="ID_OR_PATH",
        help="Model to ask. Without it, one that is served whole: by a peer that --initial-peers names, else by peers "
        "in the most networks.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Key file of a private swarm."),
]
Prompt = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT", help="The text to go on from; - reads it from stdin.", show_default=False
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What the model is told before the chat begins.")
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float, typer.Option(metavar="T", min=0.0, max=100.0, help="Randomness: 0 takes the likeliest token.")
]
TopK = Annotated[int, typer.Option(metavar="N", min=0, help="Draw from the N likeliest tokens: 0 from all.")]


def _probability(value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise typer.BadParameter(f"it must be above 0 and at most 1, got {value:g}")
    return value


TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        callback=_probability,
        help="Draw from the likeliest tokens of probability P together: above 0, to 1.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="S", min=0, max=2**64 - 1, help="The same seed draws the same tokens again."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End before this text; may be given several times.", show_default=False
    ),
]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Show the text while it is generated.")]
MarkdownShown = Annotated[
    bool,
    typer.Option("--markdown/--no-markdown", help="At a terminal, show answers as Markdown, or as they are."),
]
History = Annotated[
    bool,
    typer.Option(
        "--history/--no-history", help="At a terminal, keep what you say for the arrow keys of later chats."
    ),
]
Timeout = Annotated[
    float, typer.Option(metavar="S", min=0.0, help="Seconds that a circuit may take to form.")
]
ActivationCodec = Annotated[
    str,
    typer.Option(
        metavar="none|float16|bfloat16|int8",
        help="Fewer bytes between peers that take part, less exact: none loses nothing.",
    ),
]
Peers = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=12, help="Peer processes to start: each holds a part of the model."),
]
