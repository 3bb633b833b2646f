"""The models that a gateway serves, of one swarm and over one connection.

Begin with `served_models.py`; `swarm_protocol.py` says what a gateway needs of a swarm.
"""
