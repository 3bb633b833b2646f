"""Makes docs/MODELS.md from what the engine does; without --write, checks that it is current.

Every architecture is tried, which takes minutes; `--only llama,gemma2` tries these alone and leaves the other rows as
they are. What has been tried is said on stderr.
"""

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import transformers
from architecture_table import TOLERANCE, Finding, find, generate
from circuit_runs import engine_with
from reference_models import REFERENCE_MODELS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from molink.shards.spec import QUANTIZATIONS, Span
from molink.shards.tensor_parallel import architecture_refusal

PATH = Path(__file__).resolve().parent.parent / "docs/MODELS.md"

TABLE_1 = {
    "BaichuanForCausalLM": "`baichuan` (7B, 13B)",
    "ChatGLMForCausalLM": "`chatglm` (generations 2 and 3)",
    "CohereForCausalLM": "`cohere`",
    "DeepseekForCausalLM": "`deepseek` (the first MoE)",
    "DeepseekV2ForCausalLM": "`deepseek_v2`",
    "DeepseekV3ForCausalLM": "`deepseek_v3`",
    "FalconForCausalLM": "`falcon`",
    "GemmaForCausalLM": "`gemma`",
    "Gemma2ForCausalLM": "`gemma2`",
    "GlmForCausalLM": "`glm`",
    "GPT2LMHeadModel": "`gpt2`",
    "LlamaForCausalLM": "`llama` (not in the table; served too)",
    "Phi3ForCausalLM": "`phi3`",
    "QWenLMHeadModel": "`qwen` (the first generation)",
    "Qwen2ForCausalLM": "`qwen2`",
    "Qwen2MoeForCausalLM": "`qwen2_moe`",
    "Qwen3ForCausalLM": "`qwen3`",
    "Qwen3MoeForCausalLM": "`qwen3_moe`",
}
"""Table 1 of the MoLink system paper: class, and its architecture below."""

CONVERTED = {
    "baichuan (7B)": "`llama`",
    "baichuan 2 (7B)": "`llama`, the head's rows scaled to length 1",
    "baichuan (13B)": "`smollm3` without rotary positions, with linear biases in our attention",
    "chatglm (2, 3)": "`glm`",
    "qwen (1)": "`qwen2`, up to the length it was trained on",
    "deepseek (1, MoE)": "`qwen2_moe`, its shared experts' gate undone",
    "deepseek (1, MoE), normalized": "the same with `norm_topk_prob`",
}
"""Generation, and which class of transformers computes it."""

_CONVERTED = "## Converted\n"
_MEASURED = "Exact split | Batching | Quantization | Tensor parallel"
_KINDS = ", ".join(kind for kind in QUANTIZATIONS if kind != "none")
_INTRODUCTION = """# Models

Made by `python tests/generate_models.py --write` with transformers {version}; a test keeps it current. Do not edit it.

A peer serves every architecture that it can serve exactly, and refuses the others with the reason below. Which is
which is found out, not listed: before a peer loads a model, it makes a tiny random model with the flags of that
model's configuration (kinds of layers, windows, norms, caps, tied embeddings), runs it split in three with sessions
that join each other, and compares the logits with those of the whole model in transformers.

**Exact split** was measured here the same way, from files: split in two and in three, eight sessions of different
lengths that join at different steps, prompts in chunks, float32. Logits differ from the whole model's by at most
{tolerance:.0e} of the largest one, which is rounding, and all generated tokens are the same. Configurations are the
defaults of each class, made tiny; no real weights were loaded.

**Batching**: *packed* runs the new tokens of all sessions as one row through every matrix, with attention of our own.
*Left-padded* runs sessions with equally many new tokens as rows beside each other, with the architecture's own
attention; it costs a copy of the cached keys and values each step.

**Quantization**: what weights can be kept in, beside plain ones (`--quantization`). That the parts of a split model
compute what the whole one does, bit for bit, was measured for llama, mixtral and gpt2. Checkpoints in AWQ (4 bits),
GPTQ (2, 4, 8 bits) and block-wise fp8 are unpacked while they are read.

**Tensor parallel**: *by plan* where transformers has a plan for the architecture that divides attention and MLP; it was
run, with two processes, for those that `tests/shards/test_tensor_parallel.py` names, and never on a GPU.
"""


def architectures() -> tuple[str, ...]:
    """The rows of the file: all architectures that are tried, and then what is converted."""
    return (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *CONVERTED)


def find_rows(names: Iterable[str], report: Callable[[str], object]) -> dict[str, str]:
    """Tries these; the line of each in its table."""
    wanted = tuple(names)
    rows = {}
    for count, name in enumerate(wanted, 1):
        began = time.perf_counter()
        rows[name] = converted_line(name) if name in CONVERTED else found_line(name)
        report(f"{count}/{len(wanted)}, {time.perf_counter() - began:.1f} s: {rows[name]}")
    return rows


def found_line(architecture: str) -> str:
    (finding,) = find([architecture])
    return refused_line(finding) if finding.batching is None else served_line(finding)


def written_rows(text: str) -> dict[str, str]:
    """The lines that the file has now, by architecture."""
    tables = text[text.index(_CONVERTED) :].splitlines()
    rows = {line.strip("| ").split(" | ")[0].strip("`"): line for line in tables if line.startswith("| ")}
    return {name: line for name, line in rows.items() if name in architectures()}


def render(rows: Mapping[str, str]) -> str:
    """What the file should say."""
    ordered = [rows[name] for name in architectures() if name in rows and name not in CONVERTED]
    served = [line for line in ordered if line.count(" | ") > 1]
    refused = [line for line in ordered if line.count(" | ") == 1]
    packed = sum("| packed |" in line for line in served)
    sections = [
        _INTRODUCTION.format(version=transformers.__version__, tolerance=TOLERANCE),
        f"Of {len(ordered)} architectures, {packed} are exact in packed batches, {len(served) - packed} in "
        f"left-padded ones, and {len(refused)} are refused. {len(CONVERTED)} more kinds are converted.\n",
        "## The paper's architectures\n",
        "Table 1 of the MoLink system paper, and Llama.\n",
        _table("Class | Architecture here", [f"| `{name}` | {here} |" for name, here in TABLE_1.items()]),
        _CONVERTED,
        "These came with code of their own, which is never run. Their tensors get the names of a class of transformers "
        "that computes the same. They were compared with forwards written from their published descriptions "
        "(`tests/reference_models.py`), not with the original code or weights, which were not at hand. Their own "
        "tokenizers are code too: such a model needs a `tokenizer.json`.\n",
        _table(f"Architecture | Computed by | {_MEASURED}", [rows[name] for name in CONVERTED]),
        "## Served\n",
        _table(f"Architecture | Class | {_MEASURED}", served),
        "## Refused\n",
        _table("Architecture | Reason", refused),
    ]
    return "\n".join(sections)


def _table(head: str, lines: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + " --- |" * (head.count("|") + 1), *lines, ""])


def served_line(finding: Finding) -> str:
    exact = "yes" if finding.same_tokens and finding.difference <= TOLERANCE else "NO"
    divided = divided_by(finding.architecture)
    names = f"`{finding.architecture}` | `{finding.model_class}`"
    return f"| {names} | {exact} | {finding.batching} | {_KINDS} | {divided} |"


def divided_by(architecture: str) -> str:
    """The last column."""
    return "by plan" if architecture_refusal(architecture) is None else "no"


def refused_line(finding: Finding) -> str:
    return f"| `{finding.architecture}` | {finding.reason.replace('|', '/')} |"


def converted_line(name: str) -> str:
    model = REFERENCE_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        stored = model.save(Path(folder), model.weights())
        cuts = ((0, 1), (1, 3), (3, 4))
        runs = generate(
            [(engine_with(stored, cut), Span(*cut)) for cut in cuts],
            [(5, 9, 2, 31, 7, 7, 50), (1,), (7, 3, 9, 22)],
        )
    exact = True
    for run in runs:
        expected = model.logits(model.weights(), [*run.prompt, *run.tokens[:-1]])[len(run.prompt) - 1 :]
        difference = float((torch.stack(run.logits) - expected).abs().max() / expected.abs().max())
        exact = exact and difference <= TOLERANCE and run.tokens == expected.argmax(-1).tolist()
    return f"| {name} | {CONVERTED[name]} | {'yes' if exact else 'NO'} | packed | {_KINDS} | not tried |"


def main(report: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of checking it")
    parser.add_argument("--only", type=partial(re.split, r",(?! )"), help="architectures, between commas")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(architectures()):
        parser.error(f"there is no {', '.join(sorted(unknown))} in the table")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as in the tests; tiny matrices gain nothing from a second one
    before = PATH.read_text(encoding="utf-8")
    rows = find_rows(options.only or architectures(), partial(print, file=sys.stderr, flush=True))
    text = render((written_rows(before) if options.only else {}) | rows)
    if options.write:
        PATH.write_text(text, encoding="utf-8")
    elif before != text:
        report(f"{PATH} is not current: run python tests/generate_models.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
