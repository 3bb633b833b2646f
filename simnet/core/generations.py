"""What the bundled model generated on held-out prompts: the tokens that simulated and timed tails draw, so that guesses
are accepted as often as they were.
"""

import csv
import io
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

BUNDLED = "generations.csv"


@dataclass(frozen=True, slots=True)
class RecordedGeneration:
    """A prompt, and what followed it."""

    temperature: float
    """0: greedy."""
    prompt: tuple[int, ...]
    generated: tuple[int, ...]


@cache
def recorded_generations() -> tuple[RecordedGeneration, ...]:
    """Those that come with the simulator; `data/PROVENANCE.md` says how they were recorded."""
    text = files("molink.simnet").joinpath("data", BUNDLED).read_text(encoding="utf-8")
    return tuple(
        RecordedGeneration(float(row["temperature"]), _token_ids(row["prompt"]), _token_ids(row["generated"]))
        for row in csv.DictReader(io.StringIO(text))
    )


class GenerationTape:
    """A sequence without end: recorded generations of one temperature, one after the other, from any of them on."""

    def __init__(self, first: int, temperature: float = 0.0) -> None:
        """Raises ValueError if nothing was recorded at that temperature."""
        recorded = [one for one in recorded_generations() if one.temperature == temperature]
        if not recorded:
            raise ValueError(f"nothing was recorded at temperature {temperature:g}")
        place = first % len(recorded)
        turned = [*recorded[place:], *recorded[:place]]
        self.prompt = turned[0].prompt
        self._tokens = turned[0].generated + sum((one.prompt + one.generated for one in turned[1:]), ())

    def token(self, number: int) -> int:
        """The generated token of that number, from 0 on."""
        return self._tokens[number % len(self._tokens)]

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """So many tokens from that one on."""
        return tuple(self.token(number) for number in range(first, first + count))


def _token_ids(cell: str) -> tuple[int, ...]:
    return tuple(int(one) for one in cell.split())
