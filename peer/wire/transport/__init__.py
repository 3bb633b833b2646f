"""The packets of a link over all its connections: messages in, packets out, and back. Pure.

Begin with `packet_engine.py`; each of the others is one thing that it keeps in mind.
"""
