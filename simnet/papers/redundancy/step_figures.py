"""Figures 3 to 5 of the redundancy paper: what single steps of an instance take, by its profile."""

from collections.abc import Sequence
from pathlib import Path

from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.presentation.pictures import Picture, new_figure, saved
from molink.simnet.presentation.results import write_csv

POLICY_COLOURS = ("#999999", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
POLICY_MARKERS = ("o", "s", "D", "^", "v")
_LENGTHS = (100, 250, 500, 1000)
_PREFILLS = (1, 2, 4, 8, 16)
_DECODES = (1, 5, 10, 20, 40, 60, 80, 120)
_PAPER_ADDED_MS = 7.2
"""Figure 5, on the right: 40 sequences in a step instead of 20."""
_PAPER_SPIKE_PART = 3.0
"""Figure 5, on the left: by more than that a prompt in the step lengthens it. Its length is not said."""


def draw_steps(profile: InstanceProfile, folder: Path) -> list[Picture]:
    """All three."""
    prefill = [
        (length, batch, prefill_s(profile, length, batch)) for length in _LENGTHS for batch in _PREFILLS
    ]
    decode = [(length, batch, decode_s(profile, length, batch)) for length in _LENGTHS for batch in _DECODES]
    return [
        _times(
            folder / "figure-3-prefill",
            profile,
            prefill,
            "Steps of prefill (AcceLLM, Figure 3)",
            prompts=True,
        ),
        _times(
            folder / "figure-4-decode", profile, decode, "Steps of decode (AcceLLM, Figure 4)", prompts=False
        ),
        _interference(folder / "figure-5-interference", profile),
    ]


def prefill_s(profile: InstanceProfile, length: int, batch: int) -> float:
    """Of a step that computes so many prompts of one length."""
    attended = batch * length * (length + 1) // 2
    return profile.step_s(Work(batch * length, batch * length, attended), batch)


def decode_s(profile: InstanceProfile, length: int, batch: int, prompt: int = 0) -> float:
    """Of a step of so many sequences with that many tokens, and of a prompt if it is longer than 0."""
    tokens = batch * length
    work = Work(batch + prompt, tokens + prompt, tokens + prompt * (prompt + 1) // 2)
    return profile.step_s(work, batch + (prompt > 0))


def _times(
    stem: Path,
    profile: InstanceProfile,
    lines: Sequence[tuple[int, int, float]],
    caption: str,
    *,
    prompts: bool,
) -> Picture:
    """Time and throughput by batch, a line for each length."""

    def tokens_per_s(length: int, batch: int, seconds: float) -> float:
        return batch * (length if prompts else 1) / seconds

    rows = [(*line, tokens_per_s(*line)) for line in lines]
    write_csv(stem.with_suffix(".csv"), ("tokens", "batch", "step_s", "tokens_per_s"), rows)
    figure = new_figure(8.4, 3.8)
    times, rates = figure.subplots(1, 2)
    for number, length in enumerate(_LENGTHS):
        own = [row for row in rows if row[0] == length]
        batches = [row[1] for row in own]
        for axes, column in ((times, 2), (rates, 3)):
            axes.plot(
                batches,
                [row[column] for row in own],
                color=POLICY_COLOURS[number],
                marker=POLICY_MARKERS[number],
                markersize=4,
                label=f"{length} tokens",
            )
    times.set(xlabel="prompts" if prompts else "sequences", ylabel="step, s", ylim=(0, None))
    rates.set(xlabel="prompts" if prompts else "sequences", ylabel="tokens a second", ylim=(0, None))
    times.legend(frameon=False)
    figure.suptitle(f"{_whose(profile)}: a step of {'prompts' if prompts else 'decode'}", fontsize=11)
    return saved(figure, stem, caption)


def _interference(stem: Path, profile: InstanceProfile) -> Picture:
    """A prompt in a step of 20 sequences, and 40 sequences instead of 20."""
    rows: list[tuple[object, ...]] = []
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    parts, added_ms = [], []
    for length in _LENGTHS:
        base_s = decode_s(profile, length, 20)
        parts.append(decode_s(profile, length, 20, prompt=length) / base_s - 1)
        added_ms.append(1000 * (decode_s(profile, length, 40) - base_s))
        rows.append((length, parts[-1], _PAPER_SPIKE_PART, added_ms[-1], _PAPER_ADDED_MS))
    header = ("tokens", "longer_with_prompt", "paper_longer_with_prompt", "added_ms", "paper_added_ms")
    write_csv(stem.with_suffix(".csv"), header, rows)
    names = [str(length) for length in _LENGTHS]
    left.bar(names, [100 * part for part in parts], color=POLICY_COLOURS[1])
    left.axhline(100 * _PAPER_SPIKE_PART, color="black", linestyle="--", linewidth=1)
    left.set(xlabel="tokens of the prompt and of 20 sequences", ylabel="longer by a prompt, %")
    right.bar(names, added_ms, color=POLICY_COLOURS[2])
    right.axhline(_PAPER_ADDED_MS, color="black", linestyle="--", linewidth=1)
    right.set(xlabel="tokens of each sequence", ylabel="longer by 20 sequences, ms")
    figure.suptitle(f"{_whose(profile)}; dashed: the paper's", fontsize=11)
    return saved(figure, stem, "What a prompt, and what 20 sequences, add to a step (AcceLLM, Figure 5)")


def _whose(profile: InstanceProfile) -> str:
    return f"{profile.shape.name} on 4 x {profile.device.name}"
