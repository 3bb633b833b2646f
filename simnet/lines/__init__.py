"""Emulated lines on loopback, without root: rate, delay, jitter and queue, in front of real sockets.

Begin with `line.py`, one direction as a pure function; `shaping.py` is the command.
"""
