"""Swarms and gateways of real processes on this machine: for the demonstration, benchmarks and tests.

Begin with `local_swarm.py`.
"""
