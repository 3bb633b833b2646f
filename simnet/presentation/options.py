"""Options that several commands have, and what the texts of options mean."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from molink.peer.scheduling.in_flight_rules import RULES, rule_named
from molink.simnet.core.guessing import SimulatedSpeculation
from molink.simnet.suggestions import did_you_mean


def option(
    text: str, metavar: str | None = None, *names: str, least: float | None = None, most: float | None = None
) -> Any:  # noqa: ANN401 - as typer's own
    """An option of that help, called as its parameter is unless it is named."""
    return typer.Option(*names, metavar=metavar, help=text, min=least, max=most)


Trace = Annotated[
    Path | None,
    option(
        "arrival_s,prompt_tokens,generated_tokens of each request. Default: conversations from Azure.",
        "FILE.csv",
    ),
]
LatencyMatrix = Annotated[
    Path | None,
    option(
        "Round trips in ms between your own regions: header row and first column name them. "
        "Default: 21 AWS regions.",
        "FILE.csv",
    ),
]
LineLatencies = Annotated[
    Path | None,
    option(
        "Round trips in ms between your own regions, as for `schedule`, in place of one delay: the first machine is in "
        "the first region, the next in the next, and again from the first.",
        "FILE.csv",
    ),
]
UnusedMatrix = Annotated[
    Path | None, option("Checked; changes nothing here: no machines are far from each other.", "FILE.csv")
]
UnusedTrace = Annotated[
    Path | None, option("Checked; changes nothing here: no requests are served.", "FILE.csv")
]
UnusedSeed = Annotated[int, option("Changes nothing here: nothing is drawn.", "S", least=0)]
WarmUp = Annotated[float, option("Seconds before those that are measured.", "S", least=0.0)]
Tensors = Annotated[
    int,
    option(
        "Sent for each row from stage to stage: 2 by the papers' engine (vLLM 0.7.2), 1 by ours.",
        "N",
        least=1,
        most=2,
    ),
]
Jobs = Annotated[int | None, option("Cells at a time. Default: one a processor.", "N", least=1)]


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


def parse_speculation(option: str, text: str) -> tuple[str, ...]:
    """What `SimulatedSpeculation.named` takes, each once, commas between; raises ValueError with one sentence."""
    texts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for one in texts:
        try:
            SimulatedSpeculation.named(one)
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
