"""What becomes of a generation's circuits, as values: events and effects, which leases are kept, and the log.

Begin in `circuit_events.py`.
"""
