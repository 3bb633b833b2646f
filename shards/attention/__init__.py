"""Exact attention over packed ragged batches, whatever device they are on.

Begin with `attention.py`, which is registered with transformers; `tiled_attention.py` is for many positions at once.
"""
