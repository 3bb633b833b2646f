"""Members of a simulated swarm: what they hold and announce, what that costs on the wire, and how they move.

Begin with `member.py`; `announcing.py` and `placing.py` drive the product's own cores.
"""
