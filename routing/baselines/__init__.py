"""Baselines that the searches are measured against: heuristics and integer programs of the papers, and bounds.

Begin with `greedy.py` and `ilp.py`; nothing that a volunteer runs needs them.
"""
