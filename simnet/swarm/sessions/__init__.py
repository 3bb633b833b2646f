"""Sessions of a simulated swarm: gateways, circuits, generations, and what happens when a member goes.

Begin with `lifecycle.py`; `gateway.py` chooses routes as a client does.
"""
