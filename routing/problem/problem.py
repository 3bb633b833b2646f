"""The problem of circuit search as a value: machines, layers, what each costs and what fits where.

Problem 1 of the decentralized-scheduling paper (section 3), with what a product needs besides: layers that
are held already, layers that a machine is willing to serve, memory of the KV cache, embedding and head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from molink.routing.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    available_bytes,
    bool_array,
    float_array,
    needed_bytes,
    whole_number,
)
from molink.routing.latency.latency import CoordinateLinks, MatrixLinks, Measured, OneWayLatencies
from molink.routing.problem.circuit import Hop

_DENSE_MACHINES = 4096
"""Machines up to which coordinates are worked out into a matrix on demand: 134 MB."""
_BY_LAYER = frozenset({"layer_bytes", "kv_bytes"})
"""Arrays without an axis of machines."""


@dataclass(frozen=True, slots=True, eq=False)
class CircuitProblem:
    """Machines 0 to machines - 1, layers 0 to layers - 1. All arrays are copied and read-only afterwards.

    Anything that `numpy.asarray` takes may be passed. NaN, infinities, negative numbers and wrong shapes
    raise ValueError naming the field. Fractions of a byte are rounded to the safe side.
    """

    layer_ms: FloatArray
    """[machines] or [machines, layers]: milliseconds to compute one decode step of a layer; afterwards always
    [machines, layers]."""
    latency_ms: FloatArray | None
    """[machines, machines]: one-way milliseconds of a decode step's activation, row = from. The diagonal is
    ignored. None: the problem has `coordinates`; `links` answers for both forms."""
    free_bytes: IntArray
    """[machines]: memory free for weights that are not resident."""
    layer_bytes: IntArray
    """[layers]: weights of each layer."""
    embed_ms: FloatArray | None = None
    """[machines]: added where the circuit starts. None: nothing."""
    head_ms: FloatArray | None = None
    """[machines]: added where the circuit ends. None: nothing."""
    resident: BoolArray | None = None
    """[machines, layers]: layers that a machine already holds; they cost no free_bytes. None: no layer."""
    allowed: BoolArray | None = None
    """[machines, layers]: layers that a machine is willing to serve. None: all."""
    embed_bytes: int = 0
    """Weights needed besides the layers where the circuit starts."""
    head_bytes: int = 0
    """Weights needed besides the layers where the circuit ends."""
    shared_bytes: int = 0
    """What these two have in common: a machine that starts and ends circuits needs it once."""
    embed_resident: BoolArray | None = None
    """[machines]: where the embedding is held already. None: nowhere."""
    head_resident: BoolArray | None = None
    """[machines]: where the head is held already. None: nowhere."""
    kv_bytes: IntArray | None = None
    """[layers]: KV cache that this session needs. None: nothing."""
    free_kv_bytes: IntArray | None = None
    """[machines]: KV cache that a machine can lease. None: without limit."""
    load_ms: FloatArray | None = None
    """[machines]: milliseconds to load one cold byte, or [machines, layers]: to load each layer. None:
    loading is free."""
    load_weight: float = 0.0
    """What a millisecond of loading adds to the objective, such as 1 / (tokens that it will serve)."""
    hop_penalty_ms: FloatArray | None = None
    """[machines]: added to the objective, not to the TPOT, for each hop on a machine, such as the expected cost
    of losing it. None: nothing."""
    coordinates: CoordinateLinks | None = None
    """What predicts latencies where `latency_ms` is None; see `from_coordinates`."""

    @classmethod
    def from_coordinates(
        cls,
        *,
        layer_ms: object,
        positions: object,
        heights_ms: object,
        free_bytes: object,
        layer_bytes: object,
        measured: Measured | None = None,
        **rest: Any,  # noqa: ANN401 (the other fields, checked as in the matrix form)
    ) -> "CircuitProblem":
        """The problem of a swarm too large for a matrix: latencies from network coordinates.

        The one-way latency between two machines is the euclidean distance of their `positions` [machines,
        dimensions] plus both `heights_ms` [machines], all in one-way milliseconds, unless `measured` has the
        ordered pair. `rest` are further fields.
        """
        given: dict[str, Any] = {"layer_ms": layer_ms, "free_bytes": free_bytes, "layer_bytes": layer_bytes}
        links = CoordinateLinks.of(positions, heights_ms, measured)
        return cls(latency_ms=None, coordinates=links, **given, **rest)

    def __post_init__(self) -> None:
        layers = _length("layer_bytes", self.layer_bytes)
        machines = _length("free_bytes", self.free_bytes)
        if layers < 1:
            raise ValueError("layer_bytes must name at least one layer")
        self._require_free_bytes_of_all(machines)
        each, table = (machines,), (machines, layers)
        layer_ms = float_array("layer_ms", self.layer_ms, each, table)
        if layer_ms.ndim == 1:
            layer_ms = np.broadcast_to(layer_ms[:, None], table)
        values: dict[str, object] = {
            "layer_ms": layer_ms,
            "free_bytes": available_bytes("free_bytes", self.free_bytes, each),
            "layer_bytes": needed_bytes("layer_bytes", self.layer_bytes, (layers,)),
            "embed_bytes": whole_number("embed_bytes", self.embed_bytes),
            "head_bytes": whole_number("head_bytes", self.head_bytes),
            "shared_bytes": _part_of_both(self.shared_bytes, self.embed_bytes, self.head_bytes),
            "load_weight": float(float_array("load_weight", self.load_weight, ())),
        }
        values["latency_ms"] = self._checked_latency_ms(machines)
        for name in ("embed_ms", "head_ms", "hop_penalty_ms"):
            values[name] = (
                None if getattr(self, name) is None else float_array(name, getattr(self, name), each)
            )
        for name, shape in (
            ("resident", table),
            ("allowed", table),
            ("embed_resident", each),
            ("head_resident", each),
        ):
            values[name] = (
                None if getattr(self, name) is None else bool_array(name, getattr(self, name), shape)
            )
        if self.kv_bytes is not None:
            values["kv_bytes"] = needed_bytes("kv_bytes", self.kv_bytes, (layers,))
        if self.free_kv_bytes is not None:
            values["free_kv_bytes"] = available_bytes("free_kv_bytes", self.free_kv_bytes, each)
        if self.load_ms is not None:
            values["load_ms"] = float_array("load_ms", self.load_ms, each, table)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _require_free_bytes_of_all(self, machines: int) -> None:
        """All else is held against its length, so it is what is off where two others agree on another number."""
        latency_ms = self.latency_ms if self.coordinates is None else self.coordinates.heights_ms
        others = {_rows(self.layer_ms), _rows(latency_ms)} - {None}
        if len(others) == 1 and machines not in others and _rows(latency_ms) is not None:
            (rows,) = others
            links = "latency_ms" if self.coordinates is None else "heights_ms"
            raise ValueError(
                f"free_bytes must have the shape {(rows,)}, as layer_ms and {links} have it, got {(machines,)}"
            )

    def _checked_latency_ms(self, machines: int) -> FloatArray | None:
        if self.coordinates is None:
            return float_array("latency_ms", self.latency_ms, (machines, machines))
        if self.latency_ms is not None:
            raise ValueError("latency_ms must be None where coordinates are given")
        if len(self.coordinates.heights_ms) != machines:
            raise ValueError(f"heights_ms must have the shape {(machines,)}, as free_bytes has")
        return None

    @property
    def machines(self) -> int:
        return int(self.free_bytes.shape[0])

    @property
    def layers(self) -> int:
        return int(self.layer_bytes.shape[0])

    @property
    def links(self) -> OneWayLatencies:
        """One-way latencies, in whichever form they were given."""
        if self.latency_ms is not None:
            return MatrixLinks(self.latency_ms)
        assert self.coordinates is not None  # noqa: S101 (checked at construction)
        return self.coordinates

    @property
    def dense_latency_ms(self) -> FloatArray:
        """[machines, machines]: the matrix, worked out if need be; ValueError for too many machines."""
        if self.latency_ms is not None:
            return self.latency_ms
        if self.machines > _DENSE_MACHINES:
            raise ValueError(f"latency_ms is predicted for {self.machines} machines: too many for a matrix")
        every = np.arange(self.machines)
        return self.links.block(every, every)

    def subset(self, machines: IntArray, *, linked: bool = True) -> "CircuitProblem":
        """The problem of the chosen machines alone, numbered anew in their order, with a matrix; without
        `linked`, one in which links take no time."""
        chosen: dict[str, Any] = {"coordinates": None}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and field.name not in _BY_LAYER:
                chosen[field.name] = value[machines]
        size = len(machines)
        chosen["latency_ms"] = (
            self.links.block(machines, machines) if linked else np.broadcast_to(0.0, (size, size))
        )
        return replace(self, **chosen)

    def cold_bytes(self) -> IntArray:
        """[machines, layers]: what each layer would take from free_bytes."""
        needed = np.broadcast_to(self.layer_bytes, (self.machines, self.layers))
        return needed if self.resident is None else np.where(self.resident, 0, needed)

    def cold_embed_bytes(self) -> IntArray:
        """[machines]: what starting a circuit here would take from free_bytes."""
        return self._cold_end_bytes(self.embed_bytes, self.embed_resident, self.head_resident)

    def cold_head_bytes(self) -> IntArray:
        """[machines]: what ending a circuit here would take from free_bytes."""
        return self._cold_end_bytes(self.head_bytes, self.head_resident, self.embed_resident)

    def cold_ends_bytes(self) -> IntArray:
        """[machines]: what starting and ending a circuit here would take from free_bytes."""
        nowhere = np.zeros(self.machines, dtype=np.bool_)
        held = nowhere if self.embed_resident is None else self.embed_resident
        held = held if self.head_resident is None else held | self.head_resident
        return self.cold_embed_bytes() + self.cold_head_bytes() - np.where(held, 0, self.shared_bytes)

    def _cold_end_bytes(self, size: int, held: BoolArray | None, other: BoolArray | None) -> IntArray:
        needed = np.full(self.machines, size, dtype=np.int64)
        if other is not None:
            needed -= np.where(other, self.shared_bytes, 0)
        return needed if held is None else np.where(held, 0, needed)

    def cold_load_ms(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Milliseconds to load what is cold: [machines, layers] for the layers, [machines] for embedding and
        head."""
        if self.load_ms is None:
            nothing = np.zeros(self.machines)
            return np.zeros((self.machines, self.layers)), nothing, nothing
        if self.load_ms.ndim == 1:
            per_byte = self.load_ms
            layers = self.cold_bytes() * per_byte[:, None]
        else:
            per_byte = self.load_ms.sum(axis=1) / max(1, int(self.layer_bytes.sum()))
            layers = self.load_ms if self.resident is None else np.where(self.resident, 0.0, self.load_ms)
        return layers, self.cold_embed_bytes() * per_byte, self.cold_head_bytes() * per_byte


def tpot_ms(problem: CircuitProblem, hops: Iterable[Hop]) -> float:
    """Milliseconds of one decode step around the hops, computed anew in float64 from the problem alone.

    Computation of every layer, embedding and head, every link, and the way back from the last machine to the
    first. A circuit of one hop has no links. Loading is no part of it.
    """
    path = tuple(hops)
    total = 0.0
    for hop in path:
        total += float(problem.layer_ms[hop.machine, hop.start : hop.stop].sum())
    if problem.embed_ms is not None:
        total += float(problem.embed_ms[path[0].machine])
    if problem.head_ms is not None:
        total += float(problem.head_ms[path[-1].machine])
    if len(path) > 1:
        machines = np.array([hop.machine for hop in path])
        for link in problem.links.pairs(machines, np.roll(machines, -1)):
            total += float(link)
    return total


def objective_ms(problem: CircuitProblem, hops: Iterable[Hop]) -> float:
    """Returns what the search minimises: the TPOT, the weighted loading of all hops, and the penalties of their
    machines."""
    path = tuple(hops)
    total = tpot_ms(problem, path)
    if problem.hop_penalty_ms is not None:
        total += sum(float(problem.hop_penalty_ms[hop.machine]) for hop in path)
    if problem.load_weight > 0:
        total += problem.load_weight * sum(_load_times_ms(problem, path))
    return total


def load_ms(problem: CircuitProblem, hops: Iterable[Hop]) -> float:
    """Milliseconds until every machine of the hops holds its span; the machines load side by side."""
    return max([0.0, *_load_times_ms(problem, hops)])


def _load_times_ms(problem: CircuitProblem, hops: Iterable[Hop]) -> list[float]:
    if problem.load_ms is None:
        return []
    layers, embed, head = problem.cold_load_ms()
    times = []
    for hop in hops:
        time = float(layers[hop.machine, hop.start : hop.stop].sum())
        time += float(embed[hop.machine]) if hop.start == 0 else 0.0
        time += float(head[hop.machine]) if hop.stop == problem.layers else 0.0
        times.append(time)
    return times


def _part_of_both(shared_bytes: object, embed_bytes: int, head_bytes: int) -> int:
    shared = whole_number("shared_bytes", shared_bytes)
    if shared > min(embed_bytes, head_bytes):
        raise ValueError(
            "shared_bytes must be a part of embed_bytes and of head_bytes, and is more than one of them"
        )
    return shared


def _rows(values: object) -> int | None:
    """How many there are along the first axis; None of what is no array, of which its own check says more."""
    try:
        shape = np.asarray(values).shape
    except (ValueError, TypeError, OverflowError):
        return None
    return int(shape[0]) if shape else None


def _length(name: str, values: object) -> int:
    try:
        shape = np.asarray(values).shape
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if len(shape) != 1:
        raise ValueError(f"{name} must have one dimension, got the shape {shape}")
    return int(shape[0])
