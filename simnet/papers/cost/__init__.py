"""`molink-simnet cost`: cost-profit margins of the MoLink system paper, and of anyone's swarm.

Begin with `margins.py`.
"""
