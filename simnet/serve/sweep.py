"""A serving table at other settings than the paper's: single changes, and sweeps over several values. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from molink.simnet.core.generations import recorded_generations
from molink.simnet.presentation.options import (
    parse_counts,
    parse_micro_batches,
    parse_numbers,
    parse_speculation,
)
from molink.simnet.serve.output.table import COMPUTED
from molink.simnet.serve.presets import Preset, PresetCell
from molink.simnet.serve.served_as import ServedAs, usual
from molink.simnet.suggestions import did_you_mean

Values = Sequence[Any]
"""Of one quantity: numbers or names of rules; None where heads choose."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """What can be changed or swept over."""

    field: str
    """Of a row."""
    option: str
    """That changes it, too."""
    parse: Callable[[str, str], Values]
    """Of the name in a message and a text; raises ValueError."""


def _parse_delays(option: str, text: str) -> Values:
    return parse_numbers(option, text, zero=True)


def _parse_chunks(option: str, text: str) -> Values:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    return tuple(None if part == COMPUTED else parse_counts(option, part)[0] for part in parts)


def _parse_temperatures(option: str, text: str) -> Values:
    values = parse_numbers(option, text, zero=True)
    recorded = sorted({one.temperature for one in recorded_generations()})
    for one in values:
        if one not in recorded:
            raise ValueError(
                f"{option}: generations were recorded at {' and '.join(map(str, recorded))}, not {one:g}"
            )
    return values


QUANTITIES: Mapping[str, Quantity] = MappingProxyType(
    {
        "rate": Quantity("rate_rps", "--rate", parse_numbers),
        "mbps": Quantity("bandwidth_mbps", "--bandwidth-mbps", parse_numbers),
        "ms": Quantity("delay_ms", "--delay-ms", _parse_delays),
        "peers": Quantity("peers", "--peers", parse_counts),
        "micro-batches": Quantity("micro_batches", "--micro-batches", parse_micro_batches),
        "chunk": Quantity("prefill_chunk_tokens", "--prefill-chunk", _parse_chunks),
        "speculation": Quantity("speculation", "--speculation", parse_speculation),
        "temperature": Quantity("temperature", "--temperature", _parse_temperatures),
    }
)
"""By the name that `--sweep` takes. It takes the option's, too; and stages, which peers are."""
_SERVED_FIELDS = ("micro_batches", "prefill_chunk_tokens", "speculation", "temperature")
_BY_NAME: Mapping[str, Quantity] = MappingProxyType(
    {
        **{one.option.removeprefix("--"): one for one in QUANTITIES.values()},
        **QUANTITIES,
        "stages": QUANTITIES["peers"],
    }
)


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the paper's table."""

    values: Mapping[str, Values] = field(default_factory=dict)
    """By field of a row; of a field that is not here the table's are kept."""
    swept: tuple[str, ...] = ()
    """The fields that are swept over, in order."""
    model: str | None = None
    device: str | None = None


def parse_changes(
    options: Mapping[str, str | None], sweeps: Iterable[str], model: str | None, device: str | None
) -> Changes:
    """What options, by the names of `QUANTITIES`, and texts such as `rate=0.1,0.2` say.

    Raises:
        ValueError: a value that cannot be, or a quantity that is named twice; one sentence.
    """
    values = {
        QUANTITIES[name].field: QUANTITIES[name].parse(QUANTITIES[name].option, text)
        for name, text in options.items()
        if text is not None
    }
    swept: list[str] = []
    for text in sweeps:
        name, equals, listed = (part.strip() for part in text.partition("="))
        if not equals:
            raise ValueError(f"--sweep must be like rate=0.1,0.2,0.4, got {text!r}")
        found = _BY_NAME.get(name.lower())
        if found is None:
            near = did_you_mean(name, QUANTITIES)
            raise ValueError(f"--sweep has no quantity {name!r}{near}: choose from {', '.join(QUANTITIES)}")
        if found.field in values:
            also = "--sweep" if found.field in swept else found.option
            raise ValueError(f"--sweep {name} and {also} both say what {name} is")
        values[found.field] = found.parse(f"--sweep {name}", listed)
        swept.append(found.field)
    return Changes(values, tuple(swept), model, device)


def changed(table: Preset, changes: Changes) -> Preset:
    """The table at these settings: all of its own where single values change, those at its centre where something is
    swept. What the paper prints stays beside cells that are still as in the paper."""
    cells = [cell for cell in table.cells if not changes.swept or cell.setting == table.centre]
    model, device = changes.model or table.model, changes.device or table.device
    known = {
        (one.setting, one.policy, one.technique, one.served_as, one.peers): one.printed for one in table.cells
    }
    found: dict[tuple[object, ...], PresetCell] = {}
    for cell in cells:
        for one in _varied(cell, table, changes):
            key = (one.setting, one.policy, one.technique, one.served_as, one.peers)
            printed = known.get(key) if (model, device) == (table.model, table.device) else None
            found[key] = replace(one, printed=printed)
    order = list(dict.fromkeys(_place(one, changes) for one in found.values()))
    ordered = sorted(found.values(), key=lambda one: order.index(_place(one, changes)))
    title = table.title
    if changes.swept:
        names = [name for name, one in QUANTITIES.items() if one.field in changes.swept]
        title = f"Sweep over {' and '.join(names)}; systems of {table.name}"
    return replace(table, title=title, cells=tuple(ordered), model=model, device=device, swept=changes.swept)


def _varied(cell: PresetCell, table: Preset, changes: Changes) -> Iterable[PresetCell]:
    """The cell with every combination of the values; what is swept first changes last."""
    names = (*changes.swept, *(name for name in changes.values if name not in changes.swept))
    for combination in product(*(changes.values[name] for name in names)):
        values = dict(zip(names, combination, strict=True))
        peers = values.pop("peers", cell.peers)
        own = {name: values.pop(name) for name in _SERVED_FIELDS if name in values}
        served_as = replace(_as_usual(cell, table, peers), **own)
        yield replace(cell, setting=replace(cell.setting, **values), peers=peers, served_as=served_as)


def _as_usual(cell: PresetCell, table: Preset, peers: int) -> ServedAs:
    """As the system serves with so many peers, if that is how it does in this cell."""
    return usual(cell.policy, peers) if cell.served_as == usual(cell.policy, table.peers) else cell.served_as


def _place(cell: PresetCell, changes: Changes) -> tuple[object, ...]:
    """The same for cells that are compared with each other."""
    swept = (getattr(cell.served_as, name, None) for name in changes.swept)
    return (cell.setting, cell.peers, *swept)
