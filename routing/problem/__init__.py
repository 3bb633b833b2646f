"""Circuit search as a value: machines, layers, what each costs and which spans fit where; and what it answers with.

Begin with `problem.py`; `circuit.py` is the answer, or why there is none.
"""
