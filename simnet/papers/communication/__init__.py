"""`molink-simnet communication`: what tensor and pipeline parallelism send, and which of them to choose.

Begin with `rows.py`; `simulated_request.py` sends every message.
"""
