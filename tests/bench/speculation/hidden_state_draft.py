"""Measures heads that guess from the model's last hidden state beside the bundled draft model: the tables of decision
0065.

    OMP_NUM_THREADS=1 python tests/bench/speculation/hidden_state_draft.py --head head.pt

A head (`hidden_state_heads.py`) is trained on what the bundled model says after random beginnings, and measured on
recorded generations, which trained nothing. `--head` keeps what was trained.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bench.speculation.hidden_state_heads import (
    BLOCK,
    HeadLookup,
    HiddenStateHead,
    hidden_states,
    said_text,
    train,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from molink.peer.speculation.acceptance import DRAFT
from molink.peer.speculation.draft_model import MOST_DRAFTED, DraftLookup, Floats
from molink.peer.speculation.guess_count import CircuitCosts
from molink.peer.speculation.ngram_tables import NgramTable
from molink.peer.speculation.session_guesses import MOST_GUESSES, SessionGuesses
from molink.simnet.core.generations import GenerationTape, recorded_generations
from molink.simnet.core.guessing import bundled_draft
from molink.simnet.devices.model_shapes import shape_named
from molink.simnet.papers.speculation.__main__ import CIRCUITS, Setting

MODEL: Final = Path(__file__).resolve().parents[3] / "shards/models/tiny-shakespeare"
TEMPERATURES = (0.0, 0.8)
RIGHT = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
PROMPTS, TRIP_TOKENS, CIRCUIT_TOKENS, DELAY_MS = 16, 160, 128, 30.0
BF16, BYTES_PER_MS, READ_BYTES_PER_MS = 2, 100e3 / 8, 1008e6
"""What an uplink of 100 Mbps sends, and what an RTX 4090 reads of its memory."""
NO_ROWS, LAST_ROW, ALL_ROWS = "draft model", "head, last row returned", "head, all rows returned"
AT_TAIL = "head at the tail"


class MeasuredGuesses(SessionGuesses):
    """The product's, with any source in the draft model's place."""

    def draft_from(self, lookup: DraftLookup, *, alone: bool = False) -> None:
        """Of this source; nothing else is asked if it is alone."""
        self._lookups = {**({} if alone else self._lookups), DRAFT: lookup}


@dataclass(slots=True)
class Trips:
    """What came of the guesses of all sessions of a kind."""

    tokens: int = 0
    trips: int = 0
    ms: float = 0.0
    """On a circuit."""
    guessing_s: list[float] = field(default_factory=list)
    """That guessing took here, by trip."""
    reached: Counter[int] = field(default_factory=Counter)
    """By place in a trip: how many guesses stood behind right ones alone, and how many of them were right."""
    right: Counter[int] = field(default_factory=Counter)

    def follow(
        self, tape: GenerationTape, guesses: SessionGuesses, tokens: int, circuit: "Circuit | None" = None
    ) -> None:
        """A session more, of so many tokens."""
        guesses.extend(tape.prompt)
        came = 0
        while came < tokens:
            begun = time.perf_counter()
            travelling = guesses.propose(MOST_GUESSES)
            self.guessing_s.append(time.perf_counter() - begun)
            coming = tape.tokens(came, len(travelling) + 1)
            accepted = next((at for at, one in enumerate(travelling) if one != coming[at]), len(travelling))
            self.reached.update(range(len(travelling[: accepted + 1])))
            self.right.update(range(accepted))
            if circuit is not None:
                self.ms += circuit.trip_ms(1 + len(travelling), 1 + accepted) + guesses.begun.guessing_ms
            guesses.extend(coming[: accepted + 1])
            came += accepted + 1
            self.trips += 1
        self.tokens += came


@dataclass(frozen=True, slots=True)
class Circuit:
    """What trips take, and what each hidden state takes that the tail returns."""

    costs: CircuitCosts
    returned_ms: float
    source: str

    def trip_ms(self, rows: int, known: int) -> float:
        """Of so many rows, of which so many turn out to be of the sequence."""
        returned = {LAST_ROW: 1, ALL_ROWS: known}.get(self.source, 0)
        return self.costs.trip_ms(rows) + returned * self.returned_ms


class Sources:
    """Makes each source for a recorded generation."""

    def __init__(self, model: LlamaForCausalLM, head: HiddenStateHead) -> None:
        self._head, self._draft = head.as_draft(), bundled_draft()
        self._states: dict[float, Floats] = {}
        for temperature in TEMPERATURES:
            recorded = [one for one in recorded_generations() if one.temperature == temperature]
            ids = torch.tensor([one.prompt + one.generated for one in recorded])
            self._states[temperature] = hidden_states(model, ids).numpy()

    def of(self, source: str, number: int, temperature: float, guess_ms: float = 0.0) -> DraftLookup:
        """Whose guesses are weighed with so many milliseconds each."""
        drawing = GenerationTape(number, temperature).drawing()
        if source == NO_ROWS:
            return DraftLookup(replace(self._draft, guess_ms=guess_ms), drawing)
        states = self._states[temperature][number]
        return HeadLookup(self._head, drawing, states, guess_ms, all_rows=source != LAST_ROW)


def report_trips(sources: Sources) -> None:
    """How often guesses are right, what a trip brings, and what guessing takes here."""
    print(
        f"{PROMPTS} prompts, {TRIP_TOKENS} tokens each: how often guesses at a trip's first four places are right"
    )
    print(
        "if those before are; tokens a trip with at most 4 and 8 guesses of this source alone, and with lookup"
    )
    for temperature, source in product(TEMPERATURES, (NO_ROWS, LAST_ROW, ALL_ROWS)):
        cells = []
        for alone, most in product((True, False), (4, 8)):
            found = Trips()
            for number in range(PROMPTS):
                tape, lookup = GenerationTape(number, temperature), sources.of(source, number, temperature)
                guesses = MeasuredGuesses(drawing=tape.drawing(), fixed=most)
                guesses.draft_from(lookup, alone=alone)
                found.follow(tape, guesses, TRIP_TOKENS)
            if alone and most == 4:
                cells += [f"{found.right[at] / max(1, found.reached[at]):.3f}" for at in range(4)]
                guess_ms = 1000 * median(found.guessing_s) / MOST_DRAFTED
            cells.append(f"{found.tokens / found.trips:.2f}")
        print(
            f"temperature {temperature:g}, {source}: {', '.join(cells)}; {guess_ms:.2f} ms a guess",
            flush=True,
        )


def head_bytes(name: str) -> tuple[int, int, int]:
    """Of a large model in bf16: a hidden state, the language-model head, and one layer with the matrix that fuses."""
    shape = shape_named(name)
    layer = shape.layer_parameters(shape.layers - 1) + 2 * shape.hidden_size**2
    return BF16 * shape.hidden_size, BF16 * shape.vocabulary_size * shape.hidden_size, BF16 * layer


def report_sizes() -> None:
    """What is sent, and what the head peer holds beside its layers."""
    for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen2-7b"):
        row, vocabulary, layer = head_bytes(name)
        print(
            f"{name}: a row {row:,} bytes, {row / BYTES_PER_MS:.2f} ms; of 1,024 prompt tokens "
            f"{1.024 * row / BYTES_PER_MS:.2f} s; lm_head {vocabulary / 1e9:.2f} GB, layer {layer / 1e9:.2f} GB; "
            f"a guess reads both in {(vocabulary + layer) / READ_BYTES_PER_MS:.2f} ms"
        )


def report_circuits(sources: Sources) -> None:
    """By the cost model of decision 0056, with guesses that take no time, and with what a large model's head takes."""
    print(
        f"ms per token, {DELAY_MS:g} ms from each to each; guesses take no time; as long as the model's head takes"
    )
    for circuit, (name, _) in CIRCUITS.items():
        row, vocabulary, layer = head_bytes(name)
        read_ms = (vocabulary + layer) / READ_BYTES_PER_MS
        for temperature in TEMPERATURES:
            sessions = list(Setting(circuit, temperature, False).sessions(DELAY_MS, PROMPTS, CIRCUIT_TOKENS))
            costs = CircuitCosts(sessions[0].stages)
            for source in (NO_ROWS, LAST_ROW, ALL_ROWS, AT_TAIL):
                cells = []
                for guess_ms in (0.0, read_ms):
                    per_token_ms = []
                    for number, session in enumerate(sessions):
                        found, lookup = Trips(), sources.of(source, number, temperature, guess_ms)
                        guesses = MeasuredGuesses(
                            NgramTable(), stages=session.stages, drawing=session.drawing
                        )
                        guesses.draft_from(lookup)
                        tape = GenerationTape(number, temperature)
                        found.follow(
                            tape, guesses, CIRCUIT_TOKENS, Circuit(costs, row / BYTES_PER_MS, source)
                        )
                        per_token_ms.append(found.ms / found.tokens)
                    cells.append(f"{fmean(per_token_ms):.1f}")
                print(f"{circuit}, temperature {temperature:g}, {source}: {', '.join(cells)}", flush=True)
        chains = [
            f"{right:g}: {chain_ms(costs, right, 0.0):.1f}, {chain_ms(costs, right, read_ms):.1f}"
            for right in RIGHT
        ]
        print(f"{circuit}, chains of guesses that are right for {'; '.join(chains)}")
        one, two = costs.trip_ms(1), costs.trip_ms(2)
        of_depth_one = ", ".join(f"{two / (1 + right):.1f} (right for {right})" for right in (0.85, 0.9))
        print(f"{circuit}: without guesses {one:.1f}; with one guess of a multi-token head {of_depth_one}")


def chain_ms(costs: CircuitCosts, right: float, guess_ms: float) -> float:
    """Per token, of chains of as many guesses as pay, each right with that chance if those before are."""
    tokens = list(accumulate((right**place for place in range(1, MOST_DRAFTED + 1)), initial=1.0))
    return min((costs.trip_ms(1 + count) + count * guess_ms) / some for count, some in enumerate(tokens))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", type=Path, help="a file that keeps what was trained")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.manual_seed(given.seed)
    head = HiddenStateHead(model)
    if given.head and given.head.exists():
        head.load_state_dict(torch.load(given.head))
    else:
        text = said_text(model, given.seed)
        print(f"{len(text)} blocks of {BLOCK} tokens after {time.monotonic() - begun:.0f} s", flush=True)
        train(head, text, hidden_states(model, text).half(), given.steps, given.seed)
        if given.head:
            torch.save(head.state_dict(), given.head)
    trained = sum(one.numel() for one in head.trained())
    print(f"{trained:,} trained parameters after {time.monotonic() - begun:.0f} s", flush=True)
    sources = Sources(model, head)
    report_trips(sources)
    report_sizes()
    report_circuits(sources)


if __name__ == "__main__":
    main()
