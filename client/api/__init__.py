"""`Swarm` and `AsyncSwarm`, and the values that they give back.

Begin with `swarm.py`; `blocking.py` is the same without asyncio.
"""
