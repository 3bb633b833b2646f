"""Volunteers as values: what they bring, where they live, how long they stay; drawn, or read from a snapshot.

Begin with `volunteers.py`.
"""
