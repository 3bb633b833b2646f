"""Virtual time, simulated peers and lines, requests, and what became of them.

Begin with `serving_world.py`; `timeline.py` is the clock and `simulated_peer.py` a peer around an
engine that takes time.
"""
