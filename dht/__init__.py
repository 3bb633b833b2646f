"""The control plane: who says what of itself, signed, and how it reaches everybody; the only user of libp2p and trio.

Begin with `records/records.py`, what is said, and `node/discovery.py`, the door to all of it for asyncio.
"""
