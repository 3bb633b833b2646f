"""The searches that are used: a beam over partial circuits, and what refines its answer.

Begin with `augmented.py`, the default; `search.py` is the beam and `refined.py` goes on from what it found.
"""
