"""Worlds in which the product's own decisions run: in virtual time, and with real peers behind emulated lines.

Begin with `core/serving_world.py`, a circuit that serves, and `cli.py`, the commands.
"""
