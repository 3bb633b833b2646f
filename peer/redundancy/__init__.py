"""Who prefills, who decodes, and who keeps whose keys and values: the redundancy paper's decisions. Pure.

Begin with `roles.py`; peers do not use them yet, simulated ones do.
"""
