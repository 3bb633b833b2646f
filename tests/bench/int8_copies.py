"""`python tests/bench/int8_copies.py`: what rounding copied keys and values to int8 would cost in tokens.

The bundled model in float32 goes on behind 169 tokens whose first half of layers were rounded, as a standby's would be,
with a scale for each head and token; and beside it one whose keys and values are exact.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

GENERATIONS, PROMPT_TOKENS, NEW_TOKENS = 12, 170, 100
FOLDER = Path(__file__).parents[2] / "shards" / "models" / "tiny-shakespeare"


def rounded(values: Tensor) -> Tensor:
    """To int8 and back."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(values / scale) * scale


def main() -> None:
    """Prints the error and how many generations differ."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    torch.manual_seed(0)
    errors, other = [], 0
    for _ in range(GENERATIONS):
        with torch.inference_mode():
            begin = torch.randint(2, model.config.vocab_size, (1, 20))
            ids = model.generate(begin, max_length=PROMPT_TOKENS, min_length=PROMPT_TOKENS, do_sample=True)
            exact = model(ids[:, :-1]).past_key_values
            lossy = copy.deepcopy(exact)
            for layer in lossy.layers[: len(lossy.layers) // 2]:
                layer.keys, layer.values = rounded(layer.keys), rounded(layer.values)
            ours = theirs = ids[:, -1:]
            same = True
            for step in range(NEW_TOKENS):
                wanted = model(ours, past_key_values=exact).logits[:, -1]
                got = model(theirs, past_key_values=lossy).logits[:, -1]
                if step == 0:
                    errors.append(float((wanted - got).pow(2).mean().sqrt() / wanted.std()))
                ours, theirs = wanted.argmax(-1, keepdim=True), got.argmax(-1, keepdim=True)
                same = same and bool(ours == theirs)
        other += not same
    error = sum(errors) / len(errors)
    print(f"{other} of {GENERATIONS} generations differ; the first logits by {error:.3%} of their deviation")


if __name__ == "__main__":
    main()
