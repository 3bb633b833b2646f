"""Train molink/tiny-shakespeare-draft, which guesses what molink/tiny-shakespeare says. From this script's folder:

    python train_tiny_shakespeare_draft.py --corpus tinyshakespeare.txt --output tiny-shakespeare-draft

It imitates: its targets are the larger model's probabilities, on the text that this one was trained on, and on what it
generates itself, greedy and at temperature 0.8. The last 10 % of the corpus only measure the result. Steps and seed fix
it, never the clock. Runs on one thread, in about ten minutes.
"""

import argparse
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_tiny_shakespeare import Muon, read_corpus, save, say
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEACHER: Final = Path(__file__).resolve().parent / "tiny-shakespeare"
BLOCK: Final = 256
BATCH: Final = 16
TOP: Final = 48
"""Of the larger model's probabilities the likeliest are kept, and made to sum to 1."""
CORPUS_BLOCKS, SPOKEN = 560, ((0.0, 48), (0.8, 208))
"""How many blocks are of the corpus; of what the larger model says, by temperature."""


def build_model(end: int) -> LlamaForCausalLM:
    """A fresh model of 0.45 million parameters; embedding and head are one matrix."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


@torch.inference_mode()
def spoken(teacher: LlamaForCausalLM, plain: Tensor, temperature: float, blocks: int, seed: int) -> Tensor:
    """What the larger model says after short beginnings of the text: [blocks, BLOCK + 1]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(plain) - 8, (blocks,), generator=generator)
    prompts = torch.stack([plain[start : start + 8] for start in starts.tolist()])
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature else {"do_sample": False}
    )
    said: Tensor = teacher.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=BLOCK - 7,
        min_new_tokens=BLOCK - 7,
        top_k=0,
        **sampling,
    )
    return said


@torch.inference_mode()
def targets(teacher: LlamaForCausalLM, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens after each of the blocks' tokens, and their probabilities."""
    found = []
    for block in blocks.split(4):
        probabilities = teacher(input_ids=block[:, :-1]).logits.softmax(-1)
        top = probabilities.topk(TOP, -1)
        found.append((top.indices.to(torch.int16), (top.values / top.values.sum(-1, keepdim=True)).half()))
    return torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])


def batches(blocks: int, steps: int, seed: int) -> Iterator[Tensor]:
    """The numbers of the blocks of each step, each as often as any."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(blocks, generator=generator)])
        yield order[:BATCH]
        order = order[BATCH:]


def train(
    model: LlamaForCausalLM, blocks: Tensor, aims: tuple[Tensor, Tensor], args: argparse.Namespace
) -> None:
    """Warm up, then let the learning rate fall to zero in a straight line."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=args.lr, weight_decay=0.02),
        torch.optim.AdamW(others, lr=args.lr / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            one, lambda step: min(1.0, (step + 1) / 30, (args.steps - step) / args.steps)
        )
        for one in optimizers
    ]
    for step, chosen in enumerate(batches(len(blocks), args.steps, args.seed), 1):
        likely = model(input_ids=blocks[chosen, :-1]).logits.log_softmax(-1)
        tokens, wanted = aims[0][chosen].long(), aims[1][chosen].float()
        loss = -(wanted * likely.gather(-1, tokens)).sum(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            say(f"step {step}/{args.steps}: cross-entropy {loss:.3f}")


@torch.inference_mode()
def agreement(teacher: LlamaForCausalLM, model: LlamaForCausalLM, blocks: Tensor) -> float:
    """How often both hold the same token likeliest."""
    ours = model(input_ids=blocks[:, :-1]).logits.argmax(-1)
    theirs = teacher(input_ids=blocks[:, :-1]).logits.argmax(-1)
    return float((ours == theirs).float().mean())


def main() -> None:
    """Train, save, and measure what was saved."""
    parser = argparse.ArgumentParser(description="Train molink/tiny-shakespeare-draft.")
    parser.add_argument("--corpus", type=Path, required=True, help="tinyshakespeare.txt of char-rnn")
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    training, held_out = read_corpus(args.corpus)
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    plain, other = (torch.tensor(tokenizer.encode(text, verbose=False)) for text in (training, held_out))
    starts = torch.randint(len(plain) - BLOCK - 1, (CORPUS_BLOCKS,))
    read = torch.stack([plain[start : start + BLOCK + 1] for start in starts.tolist()])
    said = [spoken(teacher, plain, temperature, blocks, args.seed) for temperature, blocks in SPOKEN]
    blocks = torch.cat([read, *said])
    say(f"{len(blocks)} blocks of {BLOCK} tokens")
    aims = targets(teacher, blocks)
    model = build_model(tokenizer.eos_token_id)
    train(model, blocks, aims, args)
    save(model, tokenizer, args.output)
    weights = load_file(args.output / "model.safetensors")
    del weights["lm_head.weight"]  # the embedding's
    save_file(weights, args.output / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TEACHER / name, args.output / name)
    saved = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()
    for temperature, _ in SPOKEN:
        unseen = spoken(teacher, other, temperature, 16, args.seed + 1)
        say(f"same likeliest token, temperature {temperature:g}: {agreement(teacher, saved, unseen):.3f}")


if __name__ == "__main__":
    main()
