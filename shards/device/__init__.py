"""The device as the engine's thread sees it: which one it is, copies to and from it, recordings of what it runs.

Begin with `device.py`, the only module that chooses one; `cuda_graphs.py` records, `transfers.py` copies;
`garbage.py` frees what was dropped.
"""
