"""Clients of a swarm: `Swarm` for programs, `molink` for people, the gateway for everything that speaks HTTP.

Begin with `api/swarm.py`; `circuit/session.py` is one generation as its owner sees it.
"""
