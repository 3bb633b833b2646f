"""Makes docs/MODELS.md from what the engine does; without --write, checks that it is current. Takes minutes."""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from architecture_table import TOLERANCE, Finding, find, generate
from circuit_runs import engine_with
from reference_models import REFERENCE_MODELS

from molink.shards.spec import QUANTIZATIONS, Span
from molink.shards.stage import Batching
from molink.shards.tensor_parallel import architecture_refusal

AMPLIFIED = 1e-3
"""As TOLERANCE, for kinds whose tiny random model makes more of rounding. The self-check allows no more either."""

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

_KINDS = ", ".join(kind for kind in QUANTIZATIONS if kind != "none")
_INTRODUCTION = """# Models

Made by `python tests/generate_models.py --write` with transformers {version}; a test keeps it current. Do not edit it.

A peer serves every architecture that it can serve exactly, and refuses the others with the reason below. Which is
which is found out, not listed: before a peer loads a model, it makes a tiny random model with the flags of that
model's configuration (kinds of layers, windows, norms, caps, tied embeddings), runs it split in three with sessions
that join each other, and compares the logits with those of the whole model in transformers.

**Exact split** was measured here the same way, from files: split in two and in three, eight sessions of different
lengths that join at different steps, prompts in chunks, float32. Logits differ from the whole model's by at most
{tolerance:.0e} of the largest one, which is rounding, and all generated tokens are the same; where a tiny random model
makes more of rounding, the row says how much. Configurations are the defaults of each class, made tiny; no real weights
were loaded.

**Batching**: *packed* runs the new tokens of all sessions as one row through every matrix, with attention of our own.
*Left-padded* runs sessions with equally many new tokens as rows beside each other, with the architecture's own
attention; it costs a copy of the cached keys and values each step. *Rows* does so for layers that keep a state of a
session beside keys and values (linear attention, state spaces, convolutions), with our attention and without that copy.
*Token by token* says that a later chunk of a prompt goes through one token after the other, since transformers
continues from such a state no other way. *One by one* runs each session by itself with the architecture's own
attention. Sessions with states share no beginnings.

`nemotron_h` is compared with transformers where time steps are bounded as the checkpoints say (`time_step_limit`), not
by `time_step_min`, as transformers does for prompts and does not for single tokens.

**Quantization**: what weights can be kept in, beside plain ones (`--quantization`). That the parts of a split model
compute what the whole one does, bit for bit, was measured for llama, mixtral and gpt2. Checkpoints in AWQ (4 bits),
GPTQ (2, 4, 8 bits) and block-wise fp8 are unpacked while they are read.

**Tensor parallel**: *by plan* where transformers has a plan for the architecture that divides attention and MLP; it was
run, with two processes, for those that `tests/shards/test_tensor_parallel.py` names, and never on a GPU.
"""


def generate_text() -> str:
    """What the file should say."""
    findings = find()
    served = [finding for finding in findings if finding.batching is not None]
    refused = [finding for finding in findings if finding.batching is None]
    packed, padded = (
        sum(finding.batching == kind.value for finding in served)
        for kind in (Batching.PACKED, Batching.PADDED)
    )
    converted = [converted_line(name) for name in CONVERTED]
    sections = [
        _INTRODUCTION.format(version=transformers.__version__, tolerance=TOLERANCE),
        f"Of {len(findings)} architectures, {packed} are exact in packed batches, {padded} in "
        f"left-padded ones, {len(served) - packed - padded} as rows or one by one, "
        f"and {len(refused)} are refused. {len(converted)} more kinds are converted.\n",
        "## The paper's architectures\n",
        "Table 1 of the MoLink system paper, and Llama.\n",
        _table("Class | Architecture here", [f"| `{name}` | {here} |" for name, here in TABLE_1.items()]),
        "## Converted\n",
        "These came with code of their own, which is never run. Their tensors get the names of a class of transformers "
        "that computes the same. They were compared with forwards written from their published descriptions "
        "(`tests/reference_models.py`), not with the original code or weights, which were not at hand. Their own "
        "tokenizers are code too: such a model needs a `tokenizer.json`.\n",
        _table(
            "Architecture | Computed by | Exact split | Batching | Quantization | Tensor parallel", converted
        ),
        "## Served\n",
        _table(
            "Architecture | Class | Exact split | Batching | Quantization | Tensor parallel",
            [*map(served_line, served)],
        ),
        "## Refused\n",
        _table("Architecture | Reason", [*map(refused_line, refused)]),
    ]
    return "\n".join(sections)


def _table(head: str, lines: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + " --- |" * (head.count("|") + 1), *lines, ""])


def served_line(finding: Finding) -> str:
    bounds = (
        bound for bound in (TOLERANCE, AMPLIFIED) if finding.same_tokens and finding.difference <= bound
    )
    exact = {None: "NO", TOLERANCE: "yes", AMPLIFIED: f"yes, to {AMPLIFIED:.0e}"}[next(bounds, None)]
    keeps_states = finding.batching not in (Batching.PACKED.value, Batching.PADDED.value)
    divided = "no" if keeps_states else divided_by(finding.architecture)
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
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as in the tests; tiny matrices gain nothing from a second one
    text = generate_text()
    if parser.parse_args().write:
        PATH.write_text(text, encoding="utf-8")
    elif PATH.read_text(encoding="utf-8") != text:
        report(f"{PATH} is not current: run python tests/generate_models.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
