"""Cost model of a hop, term by term: the one by which circuits are chosen and explained, and prompts are cut.

Begin with `terms.py`, of decode, and `prefill_chunks.py`, of prompts; `cost.py` says what is assumed where nobody has
measured.
"""
