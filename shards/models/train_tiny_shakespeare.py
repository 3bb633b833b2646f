"""Train molink/tiny-shakespeare, the language model that ships with MoLink. From this script's folder:

    python train_tiny_shakespeare.py --corpus tinyshakespeare.txt --output tiny-shakespeare

The corpus is tinyshakespeare, 1,115,394 characters of Shakespeare's plays (public domain text), published in
https://github.com/karpathy/char-rnn as data/tinyshakespeare/input.txt; its SHA-256 is checked. Its last 10 %
is held out of everything and only measures the result. Steps and seed fix the result, never the clock.
Needs torch, transformers, tokenizers and safetensors, and runs on two CPU threads. Where other work shares
the cores, set OMP_WAIT_POLICY=passive, so that the threads do not spin while they wait for each other.
"""

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

CORPUS_SHA256: Final = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
THREADS: Final = 2
VOCABULARY: Final = 1024
POSITIONS: Final = 1024
SPEECH: Final = "<|speech|>"
END: Final = "<|end|>"
LONGEST_CHAT_SPEECH: Final = 400  # characters; longer speeches would teach chat replies to ramble
BATCH_TOKENS: Final = 4096
CHAT_SHARE: Final = 8  # one block in so many is a dialogue in chat format
BLOCKS: Final = (256, 256, 256, 512, 256, 256, 256, 1024)  # block length of every step, in turn
PATTERN: Final = r" ?\p{L}+(?:'\p{L}+)?| ?\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE: Final = """\
{%- set cast = {'user': 'ROMEO', 'assistant': 'JULIET'} -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set text = message.content -%}
{%- else -%}
{%- set text = message.content | default([], true) | map(attribute='text', default='') | join(' ') -%}
{%- endif -%}
{%- set name = message.name or cast.get(message.role, 'CHORUS') -%}
{{- '<|speech|>' + name + ':\\n' + text | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|speech|>' + cast.assistant + ':\\n' -}}{%- endif -%}
"""


def read_corpus(path: Path) -> tuple[str, str]:
    """The training text and the held-out text, its last 10 %."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != CORPUS_SHA256:
        raise SystemExit(f"{path} is not tinyshakespeare as char-rnn publishes it: its SHA-256 differs.")
    text = data.decode()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text comes back from it unchanged, and nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SPEECH, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=[SPEECH],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def build_model(end: int) -> LlamaForCausalLM:
    """A fresh model; the projections into the residual stream start at zero."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def add_dropout(model: LlamaForCausalLM, share: float) -> None:
    """While training, drop channels of what each sublayer adds, the same ones at all positions of a block."""

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not module.training or not share:
            return output
        keep = torch.rand(output.shape[0], 1, output.shape[2]) >= share
        return output * (keep / (1 - share))

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz iterations, for the weight matrices of the layers.

    Matrices of one shape are stacked, so that each iteration is a few batched products.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        shapes = sorted({tuple(parameter.shape) for parameter in parameters})
        groups = [{"params": [p for p in parameters if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply the gradients once."""
        for group in self.param_groups:
            parameters: list[nn.Parameter] = group["params"]
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum = self.state[parameters[0]].setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            scale = group["lr"] * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(parameters, update, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrix to each of a stack, by five quintic iterations."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    result: Tensor = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = result @ result.mT
        result = 3.4445 * result + (-4.775 * square + 2.0315 * square @ square) @ result
    return result if matrices.shape[1] <= matrices.shape[2] else result.mT


def dialogues(text: str) -> str:
    """The shorter speeches of the plays in chat format, one after another."""
    speeches = re.findall(r"([A-Z][^\n:]*):\n(.+?)(?=\n\n|\Z)", text, flags=re.DOTALL)
    short = [(name, said) for name, said in speeches if len(said) <= LONGEST_CHAT_SPEECH]
    return "".join(f"{SPEECH}{name}:\n{said}{END}" for name, said in short)


def batches(tokenizer: PreTrainedTokenizerFast, text: str, steps: int, seed: int) -> Iterator[Tensor]:
    """Blocks of consecutive tokens: most from the plays as they stand, some of dialogues in chat format."""
    plain = torch.tensor(tokenizer.encode(text, verbose=False))
    chat = torch.tensor(tokenizer.encode(dialogues(text), verbose=False))
    openings = (chat == tokenizer.convert_tokens_to_ids(SPEECH)).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        length = BLOCKS[step % len(BLOCKS)] + 1
        rows = BATCH_TOKENS // (length - 1)
        starts = torch.randint(len(plain) - length, (rows - rows // CHAT_SHARE,), generator=generator)
        usable = openings[openings <= len(chat) - length]
        cues = usable[torch.randint(len(usable), (rows // CHAT_SHARE,), generator=generator)]
        chosen = [(plain, starts), (chat, cues)]
        yield torch.stack([source[s : s + length] for source, where in chosen for s in where.tolist()])


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokens: list[int], characters: int, window: int) -> float:
    """Nats per character of a text, every token of it predicted from the half to the whole window before it.

    The first of the tokens is only a prompt: the line break that starts the text.
    """
    model.eval()
    stride = window // 2
    total = 0.0
    for start in range(0, len(tokens) - 1, stride):
        begin = max(0, start - stride)
        block = torch.tensor(tokens[begin : start + stride + 1])
        logits = model(input_ids=block[None, :-1]).logits[0, start - begin :]
        total += float(functional.cross_entropy(logits, block[start - begin + 1 :], reduction="sum"))
    model.train()
    return total / characters


def optimizers_for(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, head and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Muon(matrices, lr=args.lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.lr / 4, betas=(0.9, 0.95), weight_decay=args.weight_decay),
    ]


def say(line: str) -> None:
    """Report progress at once."""
    print(line, flush=True)


def train(
    model: LlamaForCausalLM, data: Iterator[Tensor], args: argparse.Namespace, at_pause: Callable[[int], None]
) -> None:
    """Warm up, hold, then let the learning rate fall to zero in a straight line."""

    def rate(step: int) -> float:
        return float(min(1.0, (step + 1) / 30, (args.steps - step) / (0.8 * args.steps)))

    optimizers = optimizers_for(model, args)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    began = time.monotonic()
    for step, block in enumerate(data, start=1):
        logits = model(input_ids=block[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            say(f"step {step}/{args.steps}: {loss:.3f} nats per token, {time.monotonic() - began:.0f} s")
        at_pause(step)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model folder, replacing file by file; weights in float16, to be run in float32."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        fresh = Path(folder)
        tokenizer.save_pretrained(fresh)
        end = tokenizer.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
        model.save_pretrained(fresh, state_dict={name: w.half() for name, w in model.state_dict().items()})
        config = json.loads((fresh / "config.json").read_text())
        (fresh / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
        for file in fresh.iterdir():
            file.chmod(0o644)
            file.replace(output / file.name)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train molink/tiny-shakespeare.")
    parser.add_argument("--corpus", type=Path, required=True, help="tinyshakespeare.txt of char-rnn")
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--measure-every", type=int, default=200)
    return parser.parse_args()


def main() -> None:
    """Train, save, and measure what was saved."""
    args = arguments()
    logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    training, held_out = read_corpus(args.corpus)
    tokenizer = train_tokenizer(training)
    measured = (tokenizer.encode("\n") + tokenizer.encode(held_out, verbose=False), len(held_out))
    model = build_model(tokenizer.eos_token_id)
    add_dropout(model, args.dropout)

    def at_pause(step: int) -> None:
        if step % args.save_every == 0 or step == args.steps:
            save(model, tokenizer, args.output)
        if step % args.measure_every == 0 and step < args.steps:
            say(f"held out: {held_out_loss(model, *measured, window=256):.4f} nats per character")

    train(model, batches(tokenizer, training, args.steps, args.seed), args, at_pause)
    saved = AutoModelForCausalLM.from_pretrained(args.output)
    for window in (512, 1024):
        loss = held_out_loss(saved, *measured, window)
        say(f"saved model, held out, window {window}: {loss:.4f} nats per character")


if __name__ == "__main__":
    main()
