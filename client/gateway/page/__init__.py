"""The page at `/`: a chat beside the living swarm, and what the browser is told of the swarm while it changes.

Begin at `routes.py`; `swarm_feed.py` tells listeners what changes, and `site/` is what the browser runs.
"""
