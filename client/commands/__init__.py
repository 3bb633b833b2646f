"""`molink`: the commands of whoever uses a swarm, and what they print.

Begin with `cli.py`; whatever loads slowly is loaded only where it is needed.
"""
