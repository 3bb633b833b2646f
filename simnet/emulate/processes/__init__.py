"""The processes of an emulation: peers with computed or timed backends, and the lines between them.

Begin with `peer.py`; `timed_backend.py` takes as long as a device would.
"""
