"""`molink-simnet redundancy`: the figures of the redundancy paper (AcceLLM), beside our own policy.

Begin with `run.py`; `cluster/` has the instances and the policies.
"""
