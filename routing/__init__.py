"""Decisions about circuits: pure, without torch, network or clock."""

from molink.routing.balanced import MachineKind, plan_balanced
from molink.routing.circuit import Circuit, Hop, NoCircuit
from molink.routing.circuits import CircuitPlan, alternatives, plan_circuits, spare_without
from molink.routing.compact_ilp import solve_compact_ilp
from molink.routing.cost import CostModel
from molink.routing.flow import throughput_bound
from molink.routing.graph import layer_graph, lower_bound_ms
from molink.routing.ilp import IlpOutcome, TimeLimitReached, solve_ilp
from molink.routing.partners import NoPartner, PartnerChoice, choose_partners
from molink.routing.placement import JoiningMachine, JoinPreview, preview_join
from molink.routing.plan import ALGORITHMS, plan_circuit
from molink.routing.planner import Criteria, plan
from molink.routing.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.rebalancing import Move, MovePolicy, propose_move
from molink.routing.reliability import Observed
from molink.routing.replanning import Hysteresis, Standing, keep_up, replan
from molink.routing.route import Route, RouteHop
from molink.routing.snapshot import Snapshot
from molink.routing.terms import Term

__all__ = [
    "ALGORITHMS",
    "Circuit",
    "CircuitPlan",
    "CircuitProblem",
    "CostModel",
    "Criteria",
    "Hop",
    "Hysteresis",
    "IlpOutcome",
    "JoinPreview",
    "JoiningMachine",
    "MachineKind",
    "Move",
    "MovePolicy",
    "NoCircuit",
    "NoPartner",
    "Observed",
    "PartnerChoice",
    "Route",
    "RouteHop",
    "Snapshot",
    "Standing",
    "Term",
    "TimeLimitReached",
    "alternatives",
    "choose_partners",
    "keep_up",
    "layer_graph",
    "load_ms",
    "lower_bound_ms",
    "plan",
    "plan_balanced",
    "plan_circuit",
    "plan_circuits",
    "preview_join",
    "propose_move",
    "replan",
    "solve_compact_ilp",
    "solve_ilp",
    "spare_without",
    "throughput_bound",
    "tpot_ms",
]
