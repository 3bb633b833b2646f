"""A peer's part in its sessions' circuits, as a core without input or output: what it computes next, sends and holds.

Begin with `hop_core.py`; `events.py` is what it is told and what it answers, `session.py` what it knows of a session.
"""
