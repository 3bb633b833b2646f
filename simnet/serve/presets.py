"""The serving tables of the two MoLink papers as scenarios. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from molink.simnet.core.request_load import LengthLimits
from molink.simnet.core.serving_times import ServingTimes
from molink.simnet.serve.paper import (
    ABLATION,
    CAPTION_RPS,
    SYSTEM_OF,
    SYSTEM_TABLE_2,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    LineSetting,
    Printings,
)
from molink.simnet.serve.served_as import WHOLE_PROMPT_TOKENS, ServedAs, usual
from molink.simnet.suggestions import did_you_mean

_SETTINGS = ("rate_rps", "bandwidth_mbps", "delay_ms", "peers")
WARM_UP_S, DURATION_S = 60.0, 1800.0
"""One minute and thirty (transmission paper, section 5)."""


@dataclass(frozen=True, slots=True)
class PresetCell:
    """One cell of a table: a system in a setting."""

    setting: LineSetting
    policy: str
    served_as: ServedAs
    peers: int
    technique: str = ""
    """In an ablation: what of the system is on."""
    printed: ServingTimes | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A table."""

    name: str
    title: str
    model: str
    device: str
    peers: int
    """In the paper; a cell may have others."""
    limits: LengthLimits
    cells: tuple[PresetCell, ...]
    baseline: str
    """The policy, or the technique, that reductions are of."""
    centre: LineSetting
    """What the paper holds fixed while it varies something else."""
    tensors_per_boundary: int = 2
    """vLLM 0.7.2, on which the papers' systems are built, sends hidden states and residual."""
    swept: tuple[str, ...] = ()
    """Fields of a row that a sweep gives values to, in its order."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Fields of a row: rows that agree in them are compared with each other."""
        others = [name for name in self.swept if name not in _SETTINGS]
        return (*_SETTINGS, *others)


def preset(name: str, policies: Sequence[str] | None = None) -> Preset:
    """The table of that name, with these policies or those of the paper and ours. Policies that a table does not have
    join it, but for tables of techniques.

    Raises:
        ValueError: there is no such table, or no such policy.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    found = PRESETS[name]
    if policies is None:
        return found
    techniques = any(cell.technique for cell in found.cells)
    known = dict.fromkeys(cell.policy for cell in found.cells) if techniques else SYSTEM_OF
    unknown = [policy for policy in policies if policy not in known]
    if unknown or not policies:
        near = did_you_mean(unknown[0], known) if unknown else ""
        raise ValueError(f"{name} compares {', '.join(known)}, not {', '.join(unknown) or 'nothing'}{near}")
    cells = found.cells if techniques else _with_policies(found, policies)
    return replace(found, cells=tuple(cell for cell in cells if cell.policy in policies))


def _with_policies(table: Preset, policies: Sequence[str]) -> Iterator[PresetCell]:
    """The table's cells, and after those of a setting its further policies."""
    for setting in dict.fromkeys(cell.setting for cell in table.cells):
        own = [cell for cell in table.cells if cell.setting == setting]
        yield from own
        printed = {SYSTEM_OF[cell.policy]: cell.printed for cell in own}
        for policy in policies:
            if policy not in {cell.policy for cell in own}:
                served_as, system = usual(policy, table.peers), SYSTEM_OF[policy]
                yield PresetCell(setting, policy, served_as, table.peers, printed=printed.get(system))


def _cells(
    printings: Printings, policies: Sequence[str], peers: int, rates_rps: Sequence[float] | None = None
) -> tuple[PresetCell, ...]:
    """Every setting with every policy; at other rates too, if these are given, with the same printed values."""
    settings = dict.fromkeys(setting for setting, _ in printings)
    return tuple(
        PresetCell(
            LineSetting(rate_rps, setting.bandwidth_mbps, setting.delay_ms),
            policy,
            usual(policy, peers),
            peers,
            printed=printings.get((setting, SYSTEM_OF[policy])),
        )
        for setting in settings
        for rate_rps in rates_rps or (setting.rate_rps,)
        for policy in policies
    )


def _five(cells: Sequence[PresetCell]) -> tuple[PresetCell, ...]:
    """The paper's own with five micro-batches, as its Tables 4 and 5 have it."""
    return tuple(
        replace(cell, served_as=ServedAs("5", WHOLE_PROMPT_TOKENS)) if cell.policy == "paper" else cell
        for cell in cells
    )


def _ablation(rates_rps: Sequence[float]) -> tuple[PresetCell, ...]:
    """The paper's techniques alone and together; ours the same way."""
    few, many = ServedAs("3", WHOLE_PROMPT_TOKENS), ServedAs("5", WHOLE_PROMPT_TOKENS)
    ours = usual("molink", 3)
    variants = (
        ("none", "concurrent", few, ABLATION["none"]),
        ("micro-batches", "concurrent", many, ABLATION["micro-batches"]),
        ("chunks", "paper", few, ABLATION["chunks"]),
        ("all", "paper", many, ABLATION["all"]),
        ("ours: transmission", "molink", few, None),
        ("ours: + micro-batches", "molink", ServedAs(ours.micro_batches, WHOLE_PROMPT_TOKENS), None),
        ("ours: + computed chunks", "molink", ours, None),
    )
    return tuple(
        PresetCell(LineSetting(rate_rps, 100, 30), policy, served_as, 3, technique, printed)
        for rate_rps in rates_rps
        for technique, policy, served_as, printed in variants
    )


_TRANSMISSION = ("concurrent", "zeromq", "paper", "molink")
_BOTH_RPS = (0.2, CAPTION_RPS)
_LONG = LengthLimits(2048, 1024)
_QWEN = ("qwen2-7b", "rtx-4090", 3, _LONG)
_CENTRE = LineSetting(0.2, 100, 30)

_ALL = (
    Preset(
        "molink-table2", "Table 2 of the transmission paper: rates", *_QWEN,
        _cells(TABLE_2, _TRANSMISSION, 3), "concurrent", _CENTRE,
    ),
    Preset(
        "molink-table3", "Table 3 of the transmission paper: bandwidths, at its caption's rate and at its cells'",
        *_QWEN, _cells(TABLE_3, _TRANSMISSION, 3, _BOTH_RPS), "concurrent", _CENTRE,
    ),
    Preset(
        "molink-table4", "Table 4 of the transmission paper: delays, at its caption's rate and at its cells'",
        *_QWEN, _five(_cells(TABLE_4, _TRANSMISSION, 3, _BOTH_RPS)), "concurrent", _CENTRE,
    ),
    Preset(
        "molink-ablation", "Table 5 of the transmission paper: techniques, at its caption's rate and at its cells'",
        *_QWEN, _ablation(_BOTH_RPS), "none", _CENTRE,
    ),
    Preset(
        "molink-system-table2", "Table 2 of the MoLink system paper", "llama-2-7b", "rtx-4090", 2,
        LengthLimits(256, 512), _cells(SYSTEM_TABLE_2, ("petals", "concurrent", "fixed-chunk", "molink"), 2),
        "concurrent", LineSetting(0.5, 100, 10),
    ),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
