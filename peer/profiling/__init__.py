"""How fast this machine is with this model: measured before serving, refined while serving.

Begin with `profile.py`, the value, and `profiler.py`, which measures it.
"""
