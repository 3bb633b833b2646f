"""How a peer's memory is divided, and to which circuits it is promised. Pure.

Begin with `leases.py`, the book of promises; `lease_rules.py` says what is granted, `memory.py` divides the cap.
"""
