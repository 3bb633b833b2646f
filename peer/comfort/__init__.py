"""Stepping aside for the volunteer, and keeping to the memory that was granted."""
