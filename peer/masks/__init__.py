"""What grammars let come next at a tail, computed by a process of its own: grammars are strangers' input.

Begin with `mask_worker.py`, the peer's side; `process.py` is the other one.
"""
