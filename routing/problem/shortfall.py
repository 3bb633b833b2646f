"""Shortfall of an infeasible problem: why there is no circuit, and what it would take."""

import numpy as np

from molink.routing.arrays import BoolArray, IntArray
from molink.routing.problem.circuit import NoCircuit, format_bytes
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import servable_layers
from molink.shards.spec import Span


def unserved(problem: CircuitProblem) -> NoCircuit | None:
    """The error for a problem with a layer that no machine can serve; None if there is none."""
    lacking: BoolArray = np.logical_not(servable_layers(problem).any(axis=0))
    if not lacking.any():
        return None
    layers = np.flatnonzero(lacking)
    return NoCircuit(_why_missing(problem, layers), _runs(lacking), _needed_bytes(problem, layers))


def shortfall(problem: CircuitProblem, reached: int) -> NoCircuit:
    """The error for a problem in which machines get as far as layer `reached`, starting from layer 0."""
    if (error := unserved(problem)) is not None:
        return error
    layers = np.arange(reached, problem.layers)
    needed = _needed_bytes(problem, layers)
    held = (
        "no machine can start a circuit"
        if reached == 0
        else f"together the machines get as far as layer {reached}"
    )
    return NoCircuit(
        f"each layer by itself fits somewhere, but {held} of {problem.layers}; "
        f"layers {Span(reached, problem.layers)} need {format_bytes(needed)} more",
        (),
        needed,
    )


def _why_missing(problem: CircuitProblem, layers: IntArray) -> str:
    if problem.machines == 0:
        return "there are no machines"
    if problem.allowed is not None and not problem.allowed[:, layers].any():
        if problem.machines == 1:
            return "the one machine does not take them: it is held to others, as a peer is by --layers"
        return f"none of the {problem.machines} machines takes them: each is held to others, as a peer is by --layers"
    if not (problem.cold_bytes()[:, layers] <= problem.free_bytes[:, None]).any():
        most = format_bytes(int(problem.free_bytes.max()))
        return (
            f"none of the {problem.machines} machines has memory for one of them (most that is free: {most})"
        )
    return (
        f"none of the {problem.machines} machines has all that one of them needs "
        "(weights, KV cache, embedding or head)"
    )


def _needed_bytes(problem: CircuitProblem, layers: IntArray) -> int:
    """Weights and KV cache of the layers, with the embedding and the head if they are among them."""
    needed = int(problem.layer_bytes[layers].sum())
    if problem.kv_bytes is not None:
        needed += int(problem.kv_bytes[layers].sum())
    starts, ends = 0 in layers, problem.layers - 1 in layers
    needed += starts * problem.embed_bytes + ends * problem.head_bytes
    return needed - (problem.shared_bytes if starts and ends else 0)


def _runs(wanted: BoolArray) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return tuple(Span(int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
