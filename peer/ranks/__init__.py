"""One peer on several devices: a process for each, told the same and ended together.

Begin with `backend.py`, the peer's side, and `process.py`, a rank's; `choice.py` decides whether it pays.
"""
