"""A peer's life: settings, start, what it is made of, its control endpoint, and its end.

Begin with `peer.py`; `bootstrap.py` puts the parts together and `compute_setup.py` prepares the device.
"""
