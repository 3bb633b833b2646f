"""`molink-simnet serve`: the serving tables of the MoLink papers, in virtual time.

Begin with `scenario.py`, what is served by what; `presets.py` has the papers' tables.
"""
