"""Ways to a peer that nobody can dial: over a relay, by a hole that both ends punch, or dialled by the other end. Begin
with `packets.py`, what a relay is told; then `relay_client.py` and `ways.py`.
"""
