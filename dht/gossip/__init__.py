"""Gossip of announcements: eager and lazy push over links, and anti-entropy between tables.

Begin with `gossip.py`; `spreading.py` decides what goes over which link, `suspicion.py` tells of who has gone.
"""
