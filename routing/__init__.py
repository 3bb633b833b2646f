"""Decisions about circuits: pure, without torch, network or clock.

Begin with `snapshot.py`, what is known of a swarm, and `problem/problem.py`, which it is posed as; `plan.py` has all
algorithms by name.
"""

from molink.routing.baselines.balanced import MachineKind, plan_balanced
from molink.routing.baselines.compact_ilp import solve_compact_ilp
from molink.routing.baselines.flow import throughput_bound
from molink.routing.baselines.graph import layer_graph, lower_bound_ms
from molink.routing.baselines.ilp import IlpOutcome, TimeLimitReached, solve_ilp
from molink.routing.circuits.circuits import CircuitPlan, alternatives, plan_circuits, spare_without
from molink.routing.cost.cost import CostModel
from molink.routing.cost.reliability import Observed
from molink.routing.cost.terms import Term
from molink.routing.placement.placement import JoiningMachine, JoinPreview, preview_join
from molink.routing.placement.rebalancing import Move, MovePolicy, propose_move
from molink.routing.plan import ALGORITHMS, plan_circuit
from molink.routing.problem.circuit import Circuit, Hop, NoCircuit
from molink.routing.problem.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.routes.partners import NoPartner, PartnerChoice, choose_partners
from molink.routing.routes.planner import Criteria, plan
from molink.routing.routes.replanning import Hysteresis, Standing, keep_up, replan
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
