"""The control plane of one process put together: joining, keeping in touch, and what the application sees of it.

Begin with `discovery.py`, the asyncio side; `network.py` is what runs inside the network's thread.
"""
