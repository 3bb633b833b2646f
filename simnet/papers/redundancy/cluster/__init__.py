"""A cluster of instances in virtual time, and the policies that serve requests on it.

Begin with `cluster.py`; `accellm.py`, `baselines.py` and `molink.py` are the policies.
"""
