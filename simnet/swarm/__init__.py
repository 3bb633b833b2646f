"""`molink-simnet swarm`: the whole product at scale, with churn.

Begin with `world.py`, the owner of everything; `factory.py` makes it from options or a snapshot.
"""
