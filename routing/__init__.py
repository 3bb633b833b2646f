"""Decisions about circuits: pure, without torch, network or clock.

Begin with `snapshot.py`, what is known of a swarm, and `problem/problem.py`, which it is posed as; `plan.py` has all
algorithms by name. What is named here is loaded on first use: a client needs less than half of it.
"""

from typing import TYPE_CHECKING

from molink.lazy_names import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "baselines.balanced": ("MachineKind", "plan_balanced"),
        "baselines.compact_ilp": ("solve_compact_ilp",),
        "baselines.flow": ("throughput_bound",),
        "baselines.graph": ("layer_graph", "lower_bound_ms"),
        "baselines.ilp": ("IlpOutcome", "TimeLimitReached", "solve_ilp"),
        "circuits.circuits": ("CircuitPlan", "alternatives", "plan_circuits", "spare_without"),
        "cost.cost": ("CostModel",),
        "cost.reliability": ("PeerObservation",),
        "cost.terms": ("Term",),
        "placement.placement": ("JoinPreview", "JoiningMachine", "preview_join"),
        "placement.rebalancing": ("Move", "MovePolicy", "propose_move"),
        "plan": ("ALGORITHMS", "plan_circuit"),
        "problem.circuit": ("Circuit", "Hop", "NoCircuit"),
        "problem.problem": ("CircuitProblem", "load_ms", "tpot_ms"),
        "routes.partners": ("NoPartner", "PartnerChoice", "choose_partners"),
        "routes.planner": ("Criteria",),
        "routes.replanning": ("Hysteresis", "IncumbentRoute", "replan", "replan_incumbent"),
        "routes.route": ("Route", "RouteHop"),
        "snapshot": ("Snapshot",),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
