"""Records what the bundled model generates on held-out prompts: what simulated and timed peers draw.

    python tests/bench/speculation/record_generations.py --corpus tinyshakespeare.txt

Writes `simnet/data/generations.csv`. The corpus is the one that the model was trained on (its card says where it is
published); prompts are of its last tenth, which no training has seen. Tokens are drawn by the product's own sampler.
"""

import argparse
import csv
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import sample
from molink.shards.spec import SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "shards/models/tiny-shakespeare"
OUTPUT = Path(__file__).resolve().parents[3] / "simnet/data/generations.csv"
PROMPTS = 16
PROMPT_TOKENS, GENERATED_TOKENS = 32, 256
SAMPLINGS = ((0.0, 1.0), (0.8, 0.9))
"""Temperature and top_p."""


def held_out_prompts(corpus: Path) -> list[list[int]]:
    """Beginnings of speeches, evenly spread over the last tenth of the text."""
    text = corpus.read_text()
    speeches = text[len(text) * 9 // 10 :].split("\n\n")[1:]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chosen = speeches[:: len(speeches) // PROMPTS][:PROMPTS]
    following = ("\n\n".join(speeches[speeches.index(one) :])[:400] for one in chosen)
    return [tokenizer.encode(one)[:PROMPT_TOKENS] for one in following]


@torch.inference_mode()
def generate(model: torch.nn.Module, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens that a circuit would generate."""
    ids, cache = prompt, None
    generated: list[int] = []
    while len(generated) < GENERATED_TOKENS:
        output = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        position = len(prompt) + len(generated)
        drawn = sample(output.logits[:, -1].float(), [SampleRequest(params, params.seed or 0, position)])
        ids = [drawn[0].token_id]
        generated += ids
    return generated


def main() -> None:
    """Records all prompts with each way of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    corpus = parser.parse_args().corpus
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with OUTPUT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["temperature", "top_p", "seed", "prompt", "generated"])
        for temperature, top_p in SAMPLINGS:
            for number, prompt in enumerate(held_out_prompts(corpus)):
                params = SamplingParams(GENERATED_TOKENS, temperature=temperature, top_p=top_p, seed=number)
                generated = generate(model, prompt, params)
                rows.writerow(
                    [temperature, top_p, number, " ".join(map(str, prompt)), " ".join(map(str, generated))]
                )


if __name__ == "__main__":
    main()
