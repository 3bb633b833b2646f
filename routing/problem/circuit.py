"""Answers of circuit search: hops in order, what they cost, or why there are none."""

from dataclasses import dataclass

from molink.shards.spec import Span


@dataclass(frozen=True, slots=True)
class Hop:
    """Layers [start, stop) on a machine, which is an index into the problem's arrays."""

    machine: int
    start: int
    stop: int

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Circuit:
    """Hops that cover the model in order, each machine at most once, closing back on the first."""

    hops: tuple[Hop, ...]
    tpot_ms: float
    """Time of one decode step around the circuit, in milliseconds, the way back to the first machine
    included."""
    load_ms: float = 0.0
    """Milliseconds until the slowest machine has loaded its cold layers; the machines load side by side."""


class NoCircuit(Exception):
    """No circuit over the machines at hand covers the model.

    `missing_layers` are the layers that no machine can serve, each taken by itself; it is empty if every
    layer has somebody but memory does not suffice for all of them. `missing_bytes` is what one more machine,
    willing to serve any layer, would have to have free (weights and KV cache together) for a circuit to
    exist: enough for certain where memory alone is short, the best estimate where what machines are willing
    to serve is the obstacle.
    """

    def __init__(self, detail: str, missing_layers: tuple[Span, ...] = (), missing_bytes: int = 0) -> None:
        self.detail = detail
        self.missing_layers = missing_layers
        self.missing_bytes = missing_bytes
        super().__init__(detail, missing_layers, missing_bytes)

    def __str__(self) -> str:
        lack = (
            f"no machine can serve layers {', '.join(map(str, self.missing_layers))}; "
            if self.missing_layers
            else ""
        )
        return (
            f"no circuit covers the model: {lack}{self.detail}. "
            f"A further machine with {format_bytes(self.missing_bytes)} of free memory would do"
        )


def format_bytes(count: int) -> str:
    """A number of bytes for people, rounded up so that having as much as it says is enough."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            tenths = -(-count * 10 // size)
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{count} bytes"
