"""Records: what peers say of themselves, as values and as signed bytes, every bound checked in both directions.

Begin with `records.py`, the values; `announcement.py` signs and verifies them.
"""
