"""From verified announcements to a route in terms of peers, kept until another is really better.

Begin with `planner.py`; `replanning.py` keeps the incumbent and `shortlist.py` is for large swarms.
"""
