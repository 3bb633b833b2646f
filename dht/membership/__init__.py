"""Who is known, who is believed, and whom to link to and to remember: pure decisions, and the directory that they fill.

Begin with `directory.py`, what is verified and alive; `membership.py` shares it between two threads.
"""
