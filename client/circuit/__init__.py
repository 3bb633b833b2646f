"""Circuits as a client builds, uses and mends them: which route, whose leases, what is done when a peer is lost.

Begin with `session.py`; `circuit_builder.py` plans and reserves, `connection.py` knows the swarm.
"""
