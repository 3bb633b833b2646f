"""The packets of a link over all its connections: messages in, packets out, and back. Pure.

Begin with `packet_engine.py` and `packet_sender.py`; each of the others is one thing that they keep in mind.
"""
