"""What a hop costs, term by term: the one cost model by which circuits are chosen and explained.

Begin with `terms.py`; `cost.py` says what is assumed where nobody has measured.
"""
