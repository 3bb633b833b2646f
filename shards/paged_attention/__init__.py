"""Attention of decode rows on a GPU, many sessions in one call, by the addresses of their blocks.

Begin with `paged.py`, which says what a kernel must do; `paged_triton.py` has those in Triton, imported only where
there is one.
"""
