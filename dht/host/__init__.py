"""The libp2p host in its own trio thread: connections and streams, and what py-libp2p must not do with them.

Begin with `host.py`; `bridge.py` is the way in from asyncio.
"""
