"""How often a draft model guesses the token that is drawn, by how random numbers become tokens: the table of decision
0064, and what guesses bring a trip.

    python tests/bench/speculation/couplings.py

The bundled model and its draft model, on recorded generations. Weighed against the draws of each coupling is the most
that any has: 1 - the distance of the two distributions (total variation).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from molink.peer.speculation.session_guesses import SessionGuesses
from molink.simnet.core.generations import GenerationTape, recorded_generations
from molink.simnet.core.guessing import bundled_draft

MODELS = Path(__file__).resolve().parents[3] / "shards/models"
CUTS = ((0.8, 0.9), (0.8, 1.0), (1.0, 1.0), (0.5, 1.0))
"""Temperature and top_p."""
RECORDED, PROMPTS, DRAWS = 0.8, 12, 20
TRIP_PROMPTS, TRIP_TOKENS = 16, 160
COLUMNS = ("likeliest", "by id", "by probability", "race", "1 - distance")


@torch.inference_mode()
def logits_of_both() -> Iterator[tuple[Tensor, Tensor]]:
    """Of each recorded place, by the model and by its draft model."""
    both = [
        AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
        for name in ("tiny-shakespeare", "tiny-shakespeare-draft")
    ]
    for one in [one for one in recorded_generations() if one.temperature == RECORDED][:PROMPTS]:
        ids = torch.tensor([[*one.prompt, *one.generated]])
        model, draft = (each(ids).logits[0, len(one.prompt) - 1 : -1].double() for each in both)
        yield model, draft


def cut(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities that are drawn from."""
    likely = torch.softmax(logits / temperature, -1).sort(descending=True, stable=True)
    kept = torch.where(likely.values.cumsum(-1) - likely.values < top_p, likely.values, 0)
    return torch.zeros_like(kept).scatter(-1, likely.indices, kept / kept.sum(-1, keepdim=True))


def by_id(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Inverse transform in the order of ids."""
    found = torch.searchsorted(probabilities.cumsum(-1), numbers, right=True)
    return found.clamp(max=probabilities.shape[1] - 1)


def by_probability(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Inverse transform, the likeliest first."""
    likely = probabilities.sort(descending=True, stable=True)
    return likely.indices.gather(1, by_id(likely.values, numbers))


def agreements(model: Tensor, draft: Tensor, likeliest: Tensor) -> tuple[float, ...]:
    """In the order of COLUMNS."""
    drawn: list[tuple[float, float, float]] = []
    for _ in range(DRAWS):
        numbers = torch.rand(len(model), 1, dtype=torch.float64)
        runs = torch.empty_like(model).exponential_()
        pairs = (
            (by_id(model, numbers), by_id(draft, numbers)),
            (by_probability(model, numbers), by_probability(draft, numbers)),
            ((model / runs).argmax(-1), (draft / runs).argmax(-1)),
        )
        first, second, third = (float((one == other).double().mean()) for one, other in pairs)
        drawn.append((first, second, third))
    of_likeliest = float(model.gather(1, likeliest[:, None]).mean())
    most = float(torch.minimum(model, draft).sum(-1).mean())
    return (of_likeliest, *map(fmean, zip(*drawn, strict=True)), most)


def tokens_per_trip(temperature: float, most: int, *, drafts: bool) -> float:
    """With at most so many guesses a trip, over all recorded prompts."""
    generated = trips = 0
    for number in range(TRIP_PROMPTS):
        tape, came = GenerationTape(number, temperature), 0
        draft = bundled_draft() if drafts else None
        guesses = SessionGuesses(draft=draft, drawing=tape.drawing(), fixed=most)
        guesses.extend(tape.prompt)
        while came < TRIP_TOKENS:
            proposed = guesses.propose(most)
            coming = tape.tokens(came, len(proposed) + 1)
            right = next((at for at, one in enumerate(proposed) if one != coming[at]), len(proposed))
            guesses.extend(coming[: right + 1])
            came += right + 1
            trips += 1
        generated += came
    return generated / trips


def main() -> None:
    """Entry point."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logits = list(logits_of_both())
    print("Guesses that are drawn, of the bundled draft model")
    print("temperature  top_p  " + "  ".join(f"{name:>14}" for name in COLUMNS))
    for temperature, top_p in CUTS:
        found = [
            agreements(cut(model, temperature, top_p), cut(draft, temperature, top_p), draft.argmax(-1))
            for model, draft in logits
        ]
        shares = "  ".join(f"{fmean(column):>14.3f}" for column in zip(*found, strict=True))
        print(f"{temperature:>11g}  {top_p:>5g}  {shares}")
    print(f"Tokens a trip, {TRIP_PROMPTS} prompts, {TRIP_TOKENS} tokens each; without the draft model")
    for temperature in (0.0, RECORDED):
        for most in (4, 8):
            with_it, without = (tokens_per_trip(temperature, most, drafts=drafts) for drafts in (True, False))
            print(f"temperature {temperature:g}, at most {most} guesses: {with_it:.2f}; {without:.2f}")


if __name__ == "__main__":
    main()
