"""The next token of each session from its logits, of all sessions of a step at once.

Begin with `sampling.py`, which says what is drawn and on what it depends; `drawing.py` is how.
"""
