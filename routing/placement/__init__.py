"""Which layers a machine should hold: when it joins, and when holding others would pay.

Begin with `placement.py`; `coverage.py` says what a placement is worth.
"""
