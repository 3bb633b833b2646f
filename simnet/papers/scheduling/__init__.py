"""`molink-simnet schedule`: the tables of the scheduling paper, and the same at any number of machines.

Begin with `comparison.py`; `testbeds.py` has the machines.
"""
