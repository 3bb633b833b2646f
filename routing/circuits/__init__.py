"""Several circuits at once: a swarm covered with disjoint ones, and spares for one that stands.

Begin with `circuits.py`; `disjoint_circuits.py` is the heuristic.
"""
