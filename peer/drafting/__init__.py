"""A draft model on the peer's device: what it guesses for sessions whose head is here, all that wait in one step.

Begin with `draft_thread.py`, which owns the thread; `draft_engine.py` is what runs on it, `opening.py` loads it.
"""
