"""How announcements spread: pushed or offered over links, compared in tables, repeated as often as there is room.

Begin with `gossip.py`; `spreading.py` decides what goes over which link, `suspicion.py` tells of who has gone.
"""
