"""What becomes of a generation's circuits: events and effects, which leases are kept, what generations of one prompt
have in common, and the log.

Begin in `circuit_events.py`.
"""
