"""Figures 3 to 5 of the redundancy paper: what single steps of an instance take, by its profile."""

from collections.abc import Sequence

from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.presentation.figures import Figure, Panel, Series

_LENGTHS = (100, 250, 500, 1000)
_PREFILLS = (1, 2, 4, 8, 16)
_DECODES = (1, 5, 10, 20, 40, 60, 80, 120)
_PAPER_ADDED_MS = 7.2
"""Figure 5, on the right: 40 sequences in a step instead of 20."""
_PAPER_SPIKE_PART = 3.0
"""Figure 5, on the left: by more than that a prompt in the step lengthens it. Its length is not said."""


def step_figures(profile: InstanceProfile) -> list[Figure]:
    """All three."""
    prefill = [
        (length, batch, seconds, batch * length / seconds)
        for length in _LENGTHS
        for batch in _PREFILLS
        for seconds in (prefill_s(profile, length, batch),)
    ]
    decode = [
        (length, batch, seconds, batch / seconds)
        for length in _LENGTHS
        for batch in _DECODES
        for seconds in (decode_s(profile, length, batch),)
    ]
    return [
        _times("figure-3-prefill", profile, prefill, "prefill", "prompts", 3),
        _times("figure-4-decode", profile, decode, "decode", "sequences", 4),
        _interference(profile),
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
    stem: str,
    profile: InstanceProfile,
    rows: Sequence[tuple[int, int, float, float]],
    phase: str,
    counted: str,
    number: int,
) -> Figure:
    """Time and throughput by batch, a line for each length."""
    panels = []
    for label, column in (("step, s", 2), ("tokens a second", 3)):
        series = []
        for length in _LENGTHS:
            own = [row for row in rows if row[0] == length]
            series.append(Series(f"{length} tokens", [row[1] for row in own], [row[column] for row in own]))
        panels.append(Panel(series, counted, label))
    header = ("tokens", "batch", "step_s", "tokens_per_s")
    title = f"{_whose(profile)}: a step of {phase}"
    return Figure(stem, f"Steps of {phase} (AcceLLM, Figure {number})", panels, header, rows, title)


def _interference(profile: InstanceProfile) -> Figure:
    """A prompt in a step of 20 sequences, and 40 sequences instead of 20."""
    rows = []
    for length in _LENGTHS:
        base_s = decode_s(profile, length, 20)
        part = decode_s(profile, length, 20, prompt=length) / base_s - 1
        added_ms = 1000 * (decode_s(profile, length, 40) - base_s)
        rows.append((length, part, _PAPER_SPIKE_PART, added_ms, _PAPER_ADDED_MS))
    names = [str(length) for length in _LENGTHS]
    longer = Series("a prompt more", names, [100 * row[1] for row in rows])
    added = Series("20 sequences more", names, [row[3] for row in rows])
    panels = [
        Panel([longer], "tokens of the prompt and of 20 sequences", "longer by a prompt, %", "bars",
              limit=100 * _PAPER_SPIKE_PART, limit_name="printed"),
        Panel([added], "tokens of each sequence", "longer by 20 sequences, ms", "bars",
              limit=_PAPER_ADDED_MS, limit_name="printed"),
    ]  # fmt: skip
    header = ("tokens", "longer_with_prompt", "paper_longer_with_prompt", "added_ms", "paper_added_ms")
    caption = "What a prompt, and what 20 sequences, add to a step (AcceLLM, Figure 5)"
    return Figure(
        "figure-5-interference", caption, panels, header, rows, f"{_whose(profile)}; dotted: the paper's"
    )


def _whose(profile: InstanceProfile) -> str:
    return f"{profile.shape.name} on 4 x {profile.device.name}"
