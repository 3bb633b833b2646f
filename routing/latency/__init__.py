"""Latencies between machines: measured, predicted from coordinates, over a relay, or assumed.

Begin with `latency.py`, what a problem holds; `coordinates.py` has the space in which peers lie.
"""
