"""`molink-simnet emulate`: real peer processes serve a trace of requests over shaped lines.

Begin with `run.py`, one run; `processes/` has what it starts.
"""
