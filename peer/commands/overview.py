"""The swarm as JSON values and as tables for people: what `molink-peer status` and `profile` print."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from molink.peer.memory.memory import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

SHORT_ID = 8
"""The last characters of a peer id: the first ones are the same for all."""
PIPE_COLUMNS = 160
SHOWN_CIRCUITS = 8
"""Of a model."""
_SHOWN_AT_NONE = frozenset({"sessions", "computed_tokens"})
"""Counts that are shown although nothing was counted yet."""
_LONG = ("peer", "model", "layers")
"""Columns that go on in the next line where a terminal is narrow."""


def print_swarm(swarm: Mapping[str, object]) -> None:
    """What `describe_swarm` returned, as a table, with a line for each model."""
    from rich import box
    from rich.table import Table

    table = Table(title="Swarm", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("peer", "id", "model", "layers", "free", "sessions", "layer\nms", "up\nMbps", "age\ns"):
        table.add_column(heading, overflow="fold", no_wrap=heading not in _LONG)
    for peer in _rows(swarm, "peers"):
        free = sum(number(peer.get(name)) for name in ("free_weight_bytes", "free_kv_bytes"))
        remark = " (takes nothing new)" if peer.get("draining") else ""
        if peer.get("same_protocol") is False:
            remark = " (speaks another version)"
        if peer.get("answers") is False:
            remark = " (does not answer)"
        cells = (
            f"{text(peer.get('name')) or '-'}{remark}",
            text(peer.get("peer_id"))[-SHORT_ID:],
            text(peer.get("model")),
            spans_text(peer.get("spans")) or "none yet",
            format_bytes(max(0, int(free))),
            f"{number(peer.get('sessions')):g}",
            f"{number(peer.get('layer_ms')):.3f}",
            "-" if peer.get("uplink_mbps") is None else f"{number(peer.get('uplink_mbps')):g}",
            f"{number(peer.get('age_s')):.0f}",
        )
        table.add_row(*map(plain_markup, cells))
    console = _console()
    console.print(table)
    for model in _rows(swarm, "models"):
        missing = spans_text(model.get("missing"))
        served = f"nobody holds layers {missing}" if missing else "complete"
        circuits = _rows(model, "circuits")
        disjoint = "" if missing else f", {_count(len(circuits), 'circuit')} without a peer in common"
        counted = _count(int(number(model.get("peers"))), "peer")
        console.print(plain_markup(f"{text(model.get('model'))}: {counted}, {served}{disjoint}"))
        names = _names(swarm)
        for circuit in circuits[:SHOWN_CIRCUITS]:
            console.print(plain_markup(f"  {_way_of(circuit, names)}"))
        if len(circuits) > SHOWN_CIRCUITS:
            console.print(f"  and {len(circuits) - SHOWN_CIRCUITS} more (--json has them all)")


def print_local(status: Mapping[str, object]) -> None:
    """What this machine's peer told of itself: a line for each value that says anything, then what it knows of the
    swarm."""
    console = _console()
    for key, value in status.items():
        if key not in ("peers", "models", "links", "circuits"):
            shown = ", ".join(map(text, value)) if isinstance(value, list) else text(value)
            if isinstance(value, bool) or (key == "paused" and value is None):
                shown = "yes" if value else "no"
            elif key == "reach":
                shown = reached(mapping(value))
            elif key == "spans":
                shown = spans_text(value) or "none"
            elif key == "memory":
                shown = free_memory(mapping(value))
            if shown and (shown != "0" or key in _SHOWN_AT_NONE):
                console.print(plain_markup(f"{key.replace('_', ' ')}: {shown}"))
    names = _names(status)
    lines = [
        f"circuit of {_count(int(number(one.get('sessions'))), 'session')}: {_way_of(one, names)}"
        for one in _rows(status, "circuits")
    ]
    for line in (*lines, *map(_link_line, _rows(status, "links"))):
        console.print(plain_markup(line))
    if "peers" in status:
        print_swarm(status)


def print_machine(machine: Mapping[str, object]) -> None:
    """What `molink-peer profile` measured, as a table of two columns."""
    from rich.table import Table

    table = Table("what", "measured", title="This machine")
    device, memory, disk = (mapping(machine.get(name)) for name in ("device", "memory", "disk"))
    table.add_row(
        "device", plain_markup(f"{device.get('name')} ({device.get('kind')}, {device.get('system')})")
    )
    if machine.get("way"):
        table.add_row("computes with", plain_markup(text(machine.get("way"))))
    table.add_row("processors", plain_markup(text(device.get("processors"))))
    if "threads" in machine:
        table.add_row("threads", plain_markup(text(machine.get("threads"))))
    for name, label in (
        ("free_bytes", "free memory"),
        ("default_bytes", "taken without --memory"),
        ("weight_limit_bytes", "of that for weights, at most"),
    ):
        table.add_row(label, format_bytes(int(number(memory.get(name)))))
    table.add_row("model", plain_markup(f"{machine.get('model')} in {machine.get('dtype')}"))
    for batch_size, layer_ms in mapping(machine.get("layer_ms")).items():
        table.add_row(f"layer, batch of {batch_size}", f"{number(layer_ms):.3f} ms")
    for tokens, layer_ms in mapping(machine.get("prefill_layer_ms")).items():
        table.add_row(f"layer, {tokens} tokens of a prompt", f"{number(layer_ms):.3f} ms")
    for dtype, layer_ms in mapping(machine.get("decode_layer_ms_by_dtype")).items():
        remark = ", the fastest here" if dtype == machine.get("fastest_dtype") else ""
        table.add_row(f"layer, one token in {dtype}", f"{number(layer_ms):.3f} ms{remark}")
    for name, label in (
        ("decode_context_ms", "layer, 1000 tokens of context more"),
        ("prefill_context_ms", "the same, one token of a prompt"),
        ("step_ms", "step, whatever its layers"),
        ("embed_ms", "embedding"),
        ("head_ms", "head"),
    ):
        table.add_row(label, f"{number(machine.get(name)):.3f} ms")
    table.add_row("loading of weights", _rate(machine.get("load_bytes_per_s")))
    cached = " (maybe from memory)" if disk.get("cached") else ""
    table.add_row("disk, reading", _rate(disk.get("read_bytes_per_s")) + cached)
    table.add_row("disk, writing", _rate(disk.get("write_bytes_per_s")))
    for address in _rows(machine, "network"):
        table.add_row(
            plain_markup(f"network, {address.get('interface')}"), plain_markup(text(address.get("address")))
        )
    console = _console()
    console.print(table)
    if machine.get("unused_gpu"):
        console.print(plain_markup(text(machine.get("unused_gpu"))))


def free_memory(memory: Mapping[str, object]) -> str:
    """What of a peer's memory is free, in words."""
    total, weights, kv = (
        format_bytes(int(number(memory.get(name))))
        for name in ("total_bytes", "free_weight_bytes", "free_kv_bytes")
    )
    return f"{total}, of which {weights} are free for weights and {kv} for KV caches"


def reached(reach: Mapping[str, object]) -> str:
    """How others reach a peer, and how its links go now."""
    parts = [text(reach.get("reachable")), f"router {text(reach.get('nat'))}"]
    relays = reach.get("relays")
    if isinstance(relays, list) and relays:
        parts.append(f"over {', '.join(text(relay)[-SHORT_ID:] for relay in relays)}")
    ways = [f"{count} {way}" for way, count in mapping(reach.get("ways")).items()]
    return ", ".join((*parts, f"links: {', '.join(ways) or 'none'}"))


def _link_line(link: Mapping[str, object]) -> str:
    measured = [
        f"{number(link.get(name)):.3g} {unit}"
        for name, unit in (("mbps", "Mbps"), ("rtt_ms", "ms round trip"), ("queueing_ms", "ms in queues"))
        if link.get(name) is not None
    ]
    return f"link to {text(link.get('peer_id'))[-SHORT_ID:]}: {', '.join(measured)}"


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def plain_markup(said: str) -> str:
    """Other peers choose their names: no control sequences, and no markup, reach the terminal."""
    from rich.markup import escape

    return escape("".join(character if character.isprintable() else "?" for character in said))


def _rows(content: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    rows = content.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def text(value: object) -> str:
    return "" if value is None else str(value)


def _count(several: int, what: str) -> str:
    return f"{several} {what}" if several == 1 else f"{several} {what}s"


def _names(swarm: Mapping[str, object]) -> Mapping[str, str]:
    """By peer id."""
    return {text(peer.get("peer_id")): text(peer.get("name")) for peer in _rows(swarm, "peers")}


def _way_of(circuit: Mapping[str, object], names: Mapping[str, str]) -> str:
    """`attic 0:6 → cellar 6:12`."""
    return " → ".join(
        f"{names.get(text(hop.get('peer_id'))) or text(hop.get('peer_id'))[-SHORT_ID:]} "
        f"{text(hop.get('start'))}:{text(hop.get('stop'))}"
        for hop in _rows(circuit, "hops")
    )


def _rate(value: object) -> str:
    return f"{format_bytes(int(number(value)))}/s"


def spans_text(value: object) -> str:
    """[[0, 4], [6, 8]] as "0:4, 6:8"."""
    spans = value if isinstance(value, list) else []
    return ", ".join(":".join(map(str, span)) for span in spans if isinstance(span, list))
