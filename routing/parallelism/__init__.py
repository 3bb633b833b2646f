"""Layouts of one model over equal devices: what they send and how fast they serve.

Begin with `layout_prediction.py`; `volumes.py` has the equations.
"""
