"""The volunteer's machine comes first: when a peer steps aside for its owner, and how it is held to its memory cap.

Begin with `rules.py`, the pure decisions; `pausing.py` does what they say.
"""
