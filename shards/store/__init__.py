"""Tensors on this machine's disk by their contents, shared by all processes of a user and bounded in size.

Begin with `blobs.py`, the store; `blob_part.py` and `known_weights.py` are how the loader sees what lies in it.
"""
