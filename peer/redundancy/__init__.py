"""Who prefills, who decodes, and who keeps whose keys and values: the redundancy paper's decisions. Pure.

Begin with `copy_sending.py`, which peers use; roles and pairs are so far those of simulated ones.
"""
