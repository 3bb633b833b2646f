"""What leaves a process next, over all of its links: one scheduler for one uplink. Pure.

Begin with `uplink.py`; `just_in_time.py` is our policy and `policies.py` has all by name.
"""
