"""Decisions about circuits: pure, without torch, network or clock.

Begin with `snapshot.py`, what is known of a swarm, and `problem/problem.py`, which it is posed as; `plan.py` has all
algorithms by name. What is named here is loaded on first use: a client needs less than half of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# A module here has its name too: whoever comes later would get that.
from molink.routing.routes.planner import plan

if TYPE_CHECKING:
    from molink.routing.baselines.balanced import MachineKind, plan_balanced
    from molink.routing.baselines.compact_ilp import solve_compact_ilp
    from molink.routing.baselines.flow import throughput_bound
    from molink.routing.baselines.graph import layer_graph, lower_bound_ms
    from molink.routing.baselines.ilp import IlpOutcome, TimeLimitReached, solve_ilp
    from molink.routing.circuits.circuits import CircuitPlan, alternatives, plan_circuits, spare_without
    from molink.routing.cost.cost import CostModel
    from molink.routing.cost.reliability import PeerObservation
    from molink.routing.cost.terms import Term
    from molink.routing.placement.placement import JoiningMachine, JoinPreview, preview_join
    from molink.routing.placement.rebalancing import Move, MovePolicy, propose_move
    from molink.routing.plan import ALGORITHMS, plan_circuit
    from molink.routing.problem.circuit import Circuit, Hop, NoCircuit
    from molink.routing.problem.problem import CircuitProblem, load_ms, tpot_ms
    from molink.routing.routes.partners import NoPartner, PartnerChoice, choose_partners
    from molink.routing.routes.planner import Criteria
    from molink.routing.routes.replanning import Hysteresis, IncumbentRoute, replan, replan_incumbent
    from molink.routing.routes.route import Route, RouteHop
    from molink.routing.snapshot import Snapshot

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
    "IncumbentRoute",
    "JoinPreview",
    "JoiningMachine",
    "MachineKind",
    "Move",
    "MovePolicy",
    "NoCircuit",
    "NoPartner",
    "PartnerChoice",
    "PeerObservation",
    "Route",
    "RouteHop",
    "Snapshot",
    "Term",
    "TimeLimitReached",
    "alternatives",
    "choose_partners",
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
    "replan_incumbent",
    "solve_compact_ilp",
    "solve_ilp",
    "spare_without",
    "throughput_bound",
    "tpot_ms",
]

_HOMES = {
    "ALGORITHMS": "molink.routing.plan",
    "Circuit": "molink.routing.problem.circuit",
    "CircuitPlan": "molink.routing.circuits.circuits",
    "CircuitProblem": "molink.routing.problem.problem",
    "CostModel": "molink.routing.cost.cost",
    "Criteria": "molink.routing.routes.planner",
    "Hop": "molink.routing.problem.circuit",
    "Hysteresis": "molink.routing.routes.replanning",
    "IlpOutcome": "molink.routing.baselines.ilp",
    "IncumbentRoute": "molink.routing.routes.replanning",
    "JoinPreview": "molink.routing.placement.placement",
    "JoiningMachine": "molink.routing.placement.placement",
    "MachineKind": "molink.routing.baselines.balanced",
    "Move": "molink.routing.placement.rebalancing",
    "MovePolicy": "molink.routing.placement.rebalancing",
    "NoCircuit": "molink.routing.problem.circuit",
    "NoPartner": "molink.routing.routes.partners",
    "PartnerChoice": "molink.routing.routes.partners",
    "PeerObservation": "molink.routing.cost.reliability",
    "Route": "molink.routing.routes.route",
    "RouteHop": "molink.routing.routes.route",
    "Snapshot": "molink.routing.snapshot",
    "Term": "molink.routing.cost.terms",
    "TimeLimitReached": "molink.routing.baselines.ilp",
    "alternatives": "molink.routing.circuits.circuits",
    "choose_partners": "molink.routing.routes.partners",
    "layer_graph": "molink.routing.baselines.graph",
    "load_ms": "molink.routing.problem.problem",
    "lower_bound_ms": "molink.routing.baselines.graph",
    "plan_balanced": "molink.routing.baselines.balanced",
    "plan_circuit": "molink.routing.plan",
    "plan_circuits": "molink.routing.circuits.circuits",
    "preview_join": "molink.routing.placement.placement",
    "propose_move": "molink.routing.placement.rebalancing",
    "replan": "molink.routing.routes.replanning",
    "replan_incumbent": "molink.routing.routes.replanning",
    "solve_compact_ilp": "molink.routing.baselines.compact_ilp",
    "solve_ilp": "molink.routing.baselines.ilp",
    "spare_without": "molink.routing.circuits.circuits",
    "throughput_bound": "molink.routing.baselines.flow",
    "tpot_ms": "molink.routing.problem.problem",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
