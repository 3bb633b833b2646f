"""Who prefills, who decodes, and who keeps whose keys and values: the redundancy paper's decisions. Pure.

Begin with `copy_sending.py` and `pair_roles.py`, which peers use; `roles.py` and `partners.py` are so far those of
simulated ones.
"""
