"""Cost model of a hop, term by term: the one by which circuits are chosen and explained.

Begin with `terms.py`; `cost.py` says what is assumed where nobody has measured.
"""
