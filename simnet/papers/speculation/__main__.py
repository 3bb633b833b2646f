"""Prints what trees of guesses, and steps sent ahead, take off a token's time: the table of decision 0056."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from molink.simnet.core.generations import GenerationTape
from molink.simnet.core.guessing import bundled_draft
from molink.simnet.core.request_load import Request
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import even_spans, shape_named
from molink.simnet.papers.speculation.variants import VARIANTS, Session
from molink.simnet.serve.scenario import SOFTWARE_MS, Scenario, SimulatedStage, circuit_plan
from molink.simnet.serve.served_as import usual

CIRCUITS = {"8 hops of llama-3.1-70b": ("llama-3.1-70b", 8), "3 hops of qwen2-7b": ("qwen2-7b", 3)}
"""On RTX 4090s, with 100 Mbps."""
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    circuit: str
    temperature: float
    drafts: bool

    def sessions(self, delay_ms: float, count: int, new_tokens: int) -> Iterator[Session]:
        """Each generates another recorded text."""
        name, hops = CIRCUITS[self.circuit]
        shape = shape_named(name)
        machines = tuple(SimulatedStage(DEVICES["rtx-4090"], span) for span in even_spans(shape.layers, hops))
        plan = circuit_plan(
            Scenario(shape, machines, 100.0, delay_ms, SOFTWARE_MS), "molink", usual("molink", hops)
        )
        stages = plan.stages_of(Request(0, 0.0, PROMPT_TOKENS, new_tokens))
        draft = bundled_draft() if self.drafts else None
        for number in range(count):
            tape = GenerationTape(number, self.temperature)
            yield Session(tape, stages, draft, tape.drawing(), new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    given = parser.parse_args()
    print(f"Milliseconds per token, {given.delay_ms:g} ms from each to each; in brackets over the chain")
    for circuit in CIRCUITS:
        for temperature in (0.0, 0.8):
            for drafts in (False, True):
                sessions = tuple(
                    Setting(circuit, temperature, drafts).sessions(
                        given.delay_ms, given.sessions, given.tokens
                    )
                )
                taken_ms = {name: mean(map(variant, sessions)) for name, variant in VARIANTS.items()}
                cells = [f"{name} {ms:.1f} ({ms / taken_ms['chain']:.2f})" for name, ms in taken_ms.items()]
                kind = "lookup, tables, draft model" if drafts else "lookup, tables"
                print(f"{circuit}, temperature {temperature:g}, {kind}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
