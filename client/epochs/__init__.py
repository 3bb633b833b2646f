"""What becomes of a generation's circuits: events and effects as values, which leases are kept, the log, and the prompt
that several share.

Begin in `circuit_events.py`.
"""
