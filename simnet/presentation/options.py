"""Options that several commands have, and what the texts of options mean."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from molink.peer.scheduling.in_flight_rules import RULES, rule_named
from molink.simnet.suggestions import did_you_mean

Output = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write report.html, result.json, and each figure as .csv and .png, there.",
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv",
        help="arrival_s,prompt_tokens,generated_tokens of each request. Default: conversations from Azure.",
        show_default=False,
    ),
]
LatencyMatrix = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv",
        help="Round trips in ms between your own regions: header row and first column name them. "
        "Default: 21 AWS regions.",
        show_default=False,
    ),
]
WarmUp = Annotated[
    float, typer.Option("--warm-up", metavar="S", min=0.0, help="Seconds before those that are measured.")
]
Tensors = Annotated[
    int,
    typer.Option(
        "--tensors-per-boundary",
        metavar="N",
        min=1,
        max=2,
        help="Sent for each row from stage to stage: 2 by the papers' engine (vLLM 0.7.2), 1 by ours.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Cells at a time. Default: one a processor.", show_default=False),
]


def parse_names(option: str, text: str, known: Collection[str] | None = None) -> tuple[str, ...]:
    """Names with commas between them, each once; raises ValueError with one sentence."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if known is not None and name not in known]
    if not names or unknown:
        of = "" if known is None else f" of {', '.join(known)}"
        near = did_you_mean(unknown[0], known) if unknown and known is not None else ""
        raise ValueError(f"{option} must be{of or ' names'}, got {', '.join(unknown) or 'none'}{near}")
    return names


def parse_numbers(option: str, text: str, *, zero: bool = False) -> tuple[float, ...]:
    """Finite numbers above 0, or 0 too, with commas between them, each once; raises ValueError with one sentence."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}") from None
    for number in numbers:
        (require_not_negative if zero else require_positive)(option, number)
    return numbers


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between them, each once; raises ValueError with one sentence."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, got {text!r}") from None
    if min(counts) < 1:
        raise ValueError(f"{option} must be at least 1, got {min(counts)}")
    return counts


def parse_micro_batches(option: str, text: str) -> tuple[str, ...]:
    """Rules or numbers with commas between them, each once; raises ValueError with one sentence."""
    texts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for one in texts:
        try:
            rule_named(one)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
    return texts


MICRO_BATCHES = f"{', '.join(RULES)} or a number"


def require_positive(option: str, value: float) -> None:
    """Raises ValueError with one sentence unless the value is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{option} must be above 0 and finite, got {value:g}")


def require_not_negative(option: str, value: float) -> None:
    """Raises ValueError with one sentence unless the value is 0 or more, and finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{option} must be 0 or more and finite, got {value:g}")
