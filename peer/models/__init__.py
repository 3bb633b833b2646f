"""Which model a peer serves, in which numbers, and where it gets it.

Begin with `model.py`; `choosing.py` decides what its owner left open.
"""
