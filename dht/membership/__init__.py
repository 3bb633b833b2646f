"""Membership: pure decisions on who is known, believed, linked to and remembered, and the directory that they fill.

Begin with `directory.py`, what is verified and alive; `membership.py` shares it between two threads.
"""
