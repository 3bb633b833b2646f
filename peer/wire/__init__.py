"""All that two ends of a link share, and all of a peer that a client may import.

Begin with `link/link.py`; underneath lie `transport/` (packets), `protocol/` (bytes) and `transmission/` (who sends
next).
"""
