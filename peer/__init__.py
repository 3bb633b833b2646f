"""A peer: a process that serves layers to circuits.

Begin with `daemon/peer.py`, its life, and `engine/stepping.py`, the way of a token through it; a client may import
`wire/` and nothing else.
"""
