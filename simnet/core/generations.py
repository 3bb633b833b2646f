"""What the bundled model generated on held-out prompts: the tokens that simulated and timed tails draw, so that guesses
are accepted as often as they were.
"""

import csv
import io
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate

from molink.peer.speculation.draft_drawing import DraftDrawing
from molink.shards.sampling.race import race_key
from molink.shards.spec import SamplingParams

BUNDLED = "generations.csv"


@dataclass(frozen=True, slots=True)
class RecordedGeneration:
    """A prompt, and what followed it."""

    temperature: float
    """0: greedy."""
    top_p: float
    seed: int
    """That tokens were drawn with, each at its position behind the prompt."""
    prompt: tuple[int, ...]
    generated: tuple[int, ...]


@cache
def recorded_generations() -> tuple[RecordedGeneration, ...]:
    """Those that come with the simulator; `data/PROVENANCE.md` says how they were recorded."""
    text = files("molink.simnet").joinpath("data", BUNDLED).read_text(encoding="utf-8")
    return tuple(
        RecordedGeneration(
            float(row["temperature"]),
            float(row["top_p"]),
            int(row["seed"]),
            _token_ids(row["prompt"]),
            _token_ids(row["generated"]),
        )
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
        self._recorded = turned
        self._begins = (0, *accumulate(len(one.prompt + one.generated) for one in turned))

    def token(self, number: int) -> int:
        """The generated token of that number, from 0 on."""
        return self._tokens[number % len(self._tokens)]

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """So many tokens from that one on."""
        return tuple(self.token(number) for number in range(first, first + count))

    def key_at(self, position: int) -> int:
        """The race in which the token at that position of the sequence was drawn, the prompt counted."""
        place = len(self.prompt) + (position - len(self.prompt)) % len(self._tokens)
        at = bisect_right(self._begins, place) - 1
        return race_key(self._recorded[at].seed, place - self._begins[at])

    def drawing(self) -> DraftDrawing | None:
        """How its tokens were drawn; None: greedily."""
        first = self._recorded[0]
        params = SamplingParams(temperature=first.temperature, top_p=first.top_p)
        return DraftDrawing(params, self.key_at) if first.temperature else None


def _token_ids(cell: str) -> tuple[int, ...]:
    return tuple(int(one) for one in cell.split())
