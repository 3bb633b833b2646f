"""What `molink-simnet serve` prints and draws, and how its rows compare with the papers'.

Begin with `output.py`; `verdicts.py` and `order.py` compare.
"""
