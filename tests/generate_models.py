"""Makes docs/MODELS.md from what the engine does; without --write, checks that it is current.

Every architecture is tried, which takes the better part of an hour; `--jobs 2` tries two at a time, each in a process
of its own. `--only llama,gemma2` tries these alone and leaves the other rows as they are. What has been tried is said
on stderr.
"""

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.models.architecture_table import find, known_architectures
from support.models.exactness import SPLITS, TOLERANCE, WHOLE, shares_prefixes
from support.models.measured_models import (
    division_faults,
    in_bfloat16,
    joining_faults,
    preemption_faults,
    quantization_faults,
    rounding_faults,
    sharing_faults,
    tiny_model,
)

from molink.shards.errors import WeightsError
from molink.shards.loading.loader import folder_refusal
from molink.shards.loading.stage_builder import TROUBLE
from molink.shards.spec import QUANTIZATIONS

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
_MEASURED = "Exact split | Batching | Shared prefixes | Quantization | Tensor parallel"
_KINDS = tuple(kind for kind in QUANTIZATIONS if kind != "none")
_RANKS = 2
_INTRODUCTION = """# Models

Made by `python tests/generate_models.py --write` with transformers {version}; a test keeps it current. Do not edit it.

A peer serves every architecture that it can serve exactly, and refuses the others with the reason below. No list
decides. Before a peer loads a model, it makes a tiny random model with the same flags (kinds of layers, windows, norms,
caps, tied embeddings), runs it split in three, and compares the logits with those of the whole model in transformers.

The tables say what was run on a CPU with tiny random models; no real weights were loaded. Most rows have the defaults
of their class; other flags stand in parentheses. [How it was measured](#how-it-was-measured) is at the end.

| Column | Meaning |
| --- | --- |
| Exact split | *yes*: whole, split in two, and split in three give the tokens of transformers. *yes, to 1e-03*: a \
tiny random model of this kind amplifies rounding so much |
| Batching: *packed* | all sessions' new tokens go as one row through every matrix, with our own attention |
| *left-padded* | equally many new tokens side by side, with the architecture's attention; copies cached keys and \
values each step |
| *rows* | the same for layers that keep a state (linear attention, state spaces, convolutions), with our attention \
and without that copy |
| *token by token* | later chunks of a prompt go one token after the other: transformers continues such a state no \
other way |
| *one by one* | each session alone, with the architecture's own attention |
| Shared prefixes | *yes*: a common beginning is computed once. *no*: layers keep states, and nobody has kept the one \
behind that beginning. Where guesses were refused, what was accepted is \
computed again |
| Quantization | what `--quantization` may be, beside none |
| Tensor parallel | *2 ranks*: two ranks gave the whole model's logits. *no*: refused, mostly because transformers has \
no plan that divides it |

Models that also take images or sound: the text part is served, and only its tensors are read or fetched. What is no
text is refused. Checkpoints in AWQ (4 bits), GPTQ (2, 4, 8 bits), and block-wise fp8 are unpacked while they are read.
All other quantized forms are refused by the name of a tensor, before anything is loaded.
What the same tests gave on a GPU is in [benchmarks](benchmarks/gpu.md#gpu-lines).
"""
_MEASUREMENT = """## How it was measured

All rows were run on one state of the code. `tests/shards/batching/test_exact_in_every_way.py` runs the same with the
rows that are served.

**Exact split, float32**, on one hop, split in two, and split in three:

- Eight sessions of different lengths join at different steps, with prompts in chunks.
- Prompts that begin alike run one after the other and together; what they have in common is computed once.
- Fourteen sessions share a pool with room for two, so that on every hop sessions moved to the host's memory and back at
  least fourteen times.

Logits differ from the whole model's by at most {tolerance:.0e} of the largest one, which is rounding, and all generated
tokens are the same. Where a tiny random model makes more of rounding, the row says to how much of the largest logit it
is exact; with every number in float64, such a model split in three differed by less than 1e-12 when sessions joined.

**Exact split, bfloat16**, split in three, the same ways: tokens are the same wherever the best two logits of the whole
model lie further apart than twice the measured difference of logits. That difference is on average no larger than what
rounding to bfloat16 does to the whole model. At least half of the positions are so clear, or as many as where that
rounding is the difference: `baichuan 2 (7B)` alone, with the near logits of its large vocabulary, has 88 of 208.

**More than text**: these models were compared with the whole class, towers and all, given text, and loaded from files
with the names under which that class is published.

**`nemotron_h`** is compared with transformers where time steps are bounded as the checkpoints say (`time_step_limit`),
not by `time_step_min`, as transformers does for prompts and does not for single tokens.

**Quantization**: matrices took the size that is announced, and the logits of a model split in three were those of the
quantized whole, bit for bit, in float32. *no* where quantized weights are refused, or take no less memory (`dbrx`).

**Tensor parallel**: {ranks} ranks, each with its share of the heads and of every MLP, computed the whole model's logits
to the same tolerance, as threads of one process, with plain weights. Ranks of quantized weights are tried with `llama`,
`qwen2`, and `mixtral` (`tests/shards/model/test_quantized_ranks.py`).
"""


class NotMadeWhole(Exception):
    """No tiny model could be made to compare with."""


def architectures() -> tuple[str, ...]:
    """The rows of the file: all architectures that are tried, and then what is converted."""
    return (*known_architectures(), *CONVERTED)


def find_rows(names: Iterable[str], report: Callable[[str], object], jobs: int = 1) -> dict[str, str]:
    """Tries these, so many at a time; the line of each in its table."""
    wanted = tuple(names)
    if jobs == 1:
        return dict(zip(wanted, map(partial(find_row, report=report), wanted), strict=True))
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare) as pool:
        return dict(zip(wanted, pool.map(partial(find_row, report=report), wanted), strict=True))


def find_row(name: str, report: Callable[[str], object]) -> str:
    began = time.perf_counter()
    line = converted_line(name, report) if name in CONVERTED else found_line(name, report)
    report(f"{time.perf_counter() - began:.1f} s: {line}")
    return line


def prepare() -> None:
    """Of each process that tries some."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as in the tests; tiny matrices gain nothing from a second one


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def found_line(architecture: str, report: Callable[[str], object]) -> str:
    finding = find(architecture)
    reason = finding.reason
    if finding.batching is not None:
        try:
            cells = measured_cells(architecture, finding.batching, report)
        except NotMadeWhole as error:
            what = re.sub(r"\S*/tmp\w+", "its folder", str(error))
            reason = f"not measured, for no tiny model of its kind could be made whole: {what}"
        except WeightsError as error:
            reason = str(error).splitlines()[0].partition(": ")[2]
        else:
            return f"| `{architecture}` | `{finding.model_class}` | {cells} |"
    return f"| `{architecture}` | {reason.replace('|', '/')} |"


def converted_line(name: str, report: Callable[[str], object]) -> str:
    return f"| {name} | {CONVERTED[name]} | {measured_cells(name, 'packed', report)} |"


def measured_cells(name: str, batching: str, report: Callable[[str], object]) -> str:
    """What the columns of _MEASURED say. Raises NotMadeWhole, and WeightsError where it is not served after all."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = tiny_model(name, Path(folder))
        except TROUBLE as error:
            raise NotMadeWhole((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        circuits = [model.circuit(cuts) for cuts in (WHOLE, *SPLITS)]
        ways = (joining_faults, sharing_faults, preemption_faults)
        faults = [fault for way in ways for circuit in circuits for fault in way(model, circuit)]
        found = in_bfloat16(model)
        faults += rounding_faults(found)
        shared = "yes" if shares_prefixes(circuits[0]) else "no"
        refused = {kind: quantization_faults(model, kind) for kind in _KINDS}
        kinds = [kind for kind, wrong in refused.items() if not wrong]
        divisible = folder_refusal(model.folder, _RANKS) is None and not division_faults(model, _RANKS)
        worded = "yes" if model.tolerance == TOLERANCE else f"yes, to {model.tolerance:.0e}"
    report(
        f"{name}: in bfloat16 {found.clear} of {found.positions} positions are clear, "
        f"{found.clear_alone} by rounding alone; {found.ours:.1e} and {found.theirs:.1e}"
    )
    for fault in faults + [f"{kind}: {fault}" for kind, wrong in refused.items() for fault in wrong]:
        report(f"{name}: {fault}")
    cells = ("NO" if faults else worded, batching, shared, ", ".join(kinds) or "no")
    return " | ".join((*cells, f"{_RANKS} ranks" if divisible else "no"))


def written_rows(text: str) -> dict[str, str]:
    """The lines that the file has now, by architecture."""
    tables = text[text.index(_CONVERTED) :].splitlines()
    rows = {line.strip("| ").split(" | ")[0].strip("`"): line for line in tables if line.startswith("| ")}
    return {name: line for name, line in rows.items() if name in architectures()}


def served_rows(text: str) -> list[str]:
    """The models that it says are served, converted ones too."""
    return [name for name, line in written_rows(text).items() if _is_served(line)]


def _is_served(line: str) -> bool:
    return line.count(" | ") > 1


def render(rows: Mapping[str, str]) -> str:
    """What the file should say."""
    ordered = [rows[name] for name in architectures() if name in rows and name not in CONVERTED]
    served = [line for line in ordered if _is_served(line)]
    refused = [line for line in ordered if not _is_served(line)]
    packed, padded = (sum(f"| {kind} |" in line for line in served) for kind in ("packed", "left-padded"))
    sections = [
        _INTRODUCTION.format(version=transformers.__version__),
        f"Of {len(ordered)} kinds, {packed} are exact in packed batches, {padded} in left-padded ones, "
        f"{len(served) - packed - padded} as rows or one by one, and {len(refused)} are refused. "
        f"{len(CONVERTED)} more kinds are converted.\n",
        _CONVERTED,
        "These came with code of their own, which is never run. Their tensors get the names of a class of transformers "
        "that computes the same. They were compared with forwards written from their published descriptions "
        "(`tests/support/models/reference_models.py`), not with the original code or weights, which were not at hand. "
        "Their own tokenizers are code too: such a model needs a `tokenizer.json`.\n",
        _table(f"Architecture | Computed by | {_MEASURED}", [rows[name] for name in CONVERTED]),
        "## Served\n",
        _table(f"Architecture | Class | {_MEASURED}", served),
        "## Refused\n",
        _table("Architecture | Reason", refused),
        "## The paper's architectures\n",
        "Table 1 of the MoLink system paper, and Llama.\n",
        _table("Class | Architecture here", [f"| `{name}` | {here} |" for name, here in TABLE_1.items()]),
        _MEASUREMENT.format(tolerance=TOLERANCE, ranks=_RANKS),
    ]
    return "\n".join(sections)


def _table(head: str, lines: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + " --- |" * (head.count("|") + 1), *lines, ""])


def main(report: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of checking it")
    parser.add_argument("--only", type=partial(re.split, r",(?! )"), help="architectures, between commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(architectures()):
        parser.error(f"there is no {', '.join(sorted(unknown))} in the table")
    prepare()
    before = PATH.read_text(encoding="utf-8")
    rows = find_rows(options.only or architectures(), say, options.jobs)
    text = render((written_rows(before) if options.only else {}) | rows)
    if options.write:
        PATH.write_text(text, encoding="utf-8")
    elif before != text:
        report(f"{PATH} is not current: run python tests/generate_models.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
