"""`molink-peer`: the commands of a volunteer, and what they print.

Begin with `cli.py`; torch and libp2p are loaded only by the commands that need them.
"""
