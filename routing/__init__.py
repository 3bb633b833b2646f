"""Decisions about circuits: pure, without torch, network or clock."""

from molink.routing.circuit import Circuit, Hop, NoCircuit
from molink.routing.cost import CostModel
from molink.routing.plan import ALGORITHMS, plan_circuit
from molink.routing.planner import Route, RouteHop, plan
from molink.routing.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.snapshot import Snapshot

__all__ = [
    "ALGORITHMS",
    "Circuit",
    "CircuitProblem",
    "CostModel",
    "Hop",
    "NoCircuit",
    "Route",
    "RouteHop",
    "Snapshot",
    "load_ms",
    "plan",
    "plan_circuit",
    "tpot_ms",
]
