"""The way of a token through one peer: steps in, a pass through the engine's thread, frames out.

Begin with `stepping.py`; `sessions.py` is what is known of each generation and `steps.py` the values in between.
"""
