"""What a later start of a peer and a `molink generate` take, in turns with another tree: python tests/bench/start.py

A random Llama of 2,048 by 16 in bfloat16 (2.2 GB, with a tokenizer of as many words) is made in a temporary
folder, or found in that of `--model`. Wall time means little on a busy machine; processor time of the process and its
children is printed beside it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.tables import Table

PEER = "from molink.peer.commands.cli import main; main()"
CLIENT = "from molink.client.commands.cli import main; main()"
PROMPT = "w11 w12 w13 w14"
START_BAR_S, FIRST_TOKEN_BAR_S, HELP_BAR_S = 2.0, 0.8, 0.5
LINE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Taken:
    wall_s: float
    processor_s: float


@dataclass(slots=True)
class Tree:
    """A checkout, and what its commands took."""

    name: str
    python_path: str
    state_dir: Path
    taken: dict[str, list[Taken]] = field(default_factory=dict)

    def note(self, what: str, taken: Taken) -> None:
        self.taken.setdefault(what, []).append(taken)


def make_model(folder: Path) -> None:
    """Another process makes it: what that takes of memory is gone afterwards."""
    program = (
        "import sys, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "torch.manual_seed(0); torch.set_default_dtype(torch.bfloat16)\n"
        "LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=8192,\n"
        "    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,\n"
        "    tie_word_embeddings=False)).save_pretrained(sys.argv[1])\n"
        "from tokenizers import Tokenizer, models, pre_tokenizers\n"
        "made = Tokenizer(models.WordLevel({f'w{one}': one for one in range(32000)}, unk_token='w0'))\n"
        "made.pre_tokenizer = pre_tokenizers.Whitespace()\n"
        "made.save(sys.argv[1] + '/tokenizer.json')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


@contextmanager
def running(
    tree: Tree, program: str, arguments: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """The process and when it was begun; it is ended with the block."""
    environment = os.environ | {"PYTHONPATH": tree.python_path}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # installed packages have their bytecode: so has this one
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process, began_s
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def processor_s(pid: int) -> float:
    """Of the process and its living and ended children."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
        ended = process.cpu_times()
        total += ended.children_user + ended.children_system
    return total


def until_line(process: subprocess.Popen[bytes], wanted: str) -> list[str]:
    """The lines up to that one."""
    lines: list[str] = []
    deadline_s = time.perf_counter() + LINE_TIMEOUT_S
    while process.stdout is not None and time.perf_counter() < deadline_s:
        line = process.stdout.readline().decode()
        if not line:
            break
        lines.append(line.strip())
        if lines[-1] == wanted:
            return lines
    said = process.stderr.read().decode()[-2000:] if process.stderr is not None else ""
    raise RuntimeError(f"no {wanted!r} came: {lines} {said}")


def until_idle(process: subprocess.Popen[bytes]) -> None:
    """Packing, and what else goes on after `ready`, is over: half a second takes the process a tenth of it at most."""
    deadline_s = time.perf_counter() + LINE_TIMEOUT_S
    used_s = processor_s(process.pid)
    while time.perf_counter() < deadline_s:
        time.sleep(0.5)
        before_s, used_s = used_s, processor_s(process.pid)
        if used_s - before_s < 0.05:
            return
    raise RuntimeError("the peer goes on computing for nobody")


def join(tree: Tree, model: str) -> list[str]:
    """Threads are given: with a choice of them a busy machine is measured at each start."""
    options = ["--memory", "6GB", "--threads", "2", "--state-dir", str(tree.state_dir)]
    return ["join", "--new-swarm", "--model", model, *options]


def start_peer(tree: Tree, model: str) -> Taken:
    with running(tree, PEER, join(tree, model)) as (process, began_s):
        until_line(process, "ready")
        return Taken(time.perf_counter() - began_s, processor_s(process.pid))


def first_token(tree: Tree, address: str) -> Taken:
    options = ["--initial-peers", address, "--max-new-tokens", "4"]
    with running(tree, CLIENT, ["generate", PROMPT, *options]) as (process, began_s):
        if process.stdout is None or not process.stdout.read(1):
            raise RuntimeError(process.stderr.read().decode()[-2000:] if process.stderr else "nothing came")
        return Taken(time.perf_counter() - began_s, processor_s(process.pid))


def help_text(tree: Tree, program: str) -> Taken:
    with running(tree, program, ["--help"]) as (process, began_s):
        _, status, used = os.wait4(process.pid, 0)
        taken = Taken(time.perf_counter() - began_s, used.ru_utime + used.ru_stime)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError("--help failed")
        return taken


def measure(trees: Sequence[Tree], model: str, rounds: int, *, only_client: bool) -> None:
    for tree in trees:
        if not only_client:
            tree.note("first start", start_peer(tree, model))
    for _ in range(rounds):
        for tree in trees:
            tree.note("molink --help", help_text(tree, CLIENT))
            tree.note("molink-peer --help", help_text(tree, PEER))
            if not only_client:
                tree.note("later start", start_peer(tree, model))
    with running(trees[0], PEER, join(trees[0], model)) as (process, _):
        (invitation,) = [line for line in until_line(process, "ready") if line.startswith("Invite")]
        address = invitation.split("--initial-peers ")[1].split()[0]
        until_idle(process)
        for _ in range(rounds):
            for tree in trees:
                tree.note("generate", first_token(tree, address))


def report(trees: Sequence[Tree]) -> None:
    """Medians; bars are for wall time, of the first tree."""
    table, bars = Table(), {"later start": START_BAR_S, "generate": FIRST_TOKEN_BAR_S}
    for what in trees[0].taken:
        for tree in trees:
            walls = [one.wall_s for one in tree.taken[what]]
            processors = [one.processor_s for one in tree.taken[what]]
            bar_s = bars.get(what, HELP_BAR_S if what.endswith("help") else None)
            if tree is trees[0] and bar_s is not None:
                table.judge(f"{what}, wall", round(statistics.median(walls), 2), "s", bar_s)
            else:
                table.note(f"{what}, wall, {tree.name}", f"{statistics.median(walls):.2f} s")
            table.note(
                f"{what}, processor, {tree.name}",
                f"{statistics.median(processors):.2f} s ({min(processors):.2f})",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", help="what PYTHONPATH is for the other tree, to be measured in turns")
    parser.add_argument("--model", help="where the large model is, or is to be made; or a model's identifier")
    parser.add_argument("--only-client", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or f"{scratch}/llama-1b"
        if "/" in model and not Path(model).exists() and Path(model).parent.is_dir():
            make_model(Path(model))
        here = Tree("now", os.environ.get("PYTHONPATH", ""), Path(scratch) / "now")
        trees = [here, *([Tree("base", given.base, Path(scratch) / "base")] if given.base else [])]
        measure(trees, model, given.rounds, only_client=given.only_client)
    report(trees)


if __name__ == "__main__":
    main()
