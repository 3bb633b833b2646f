"""What a peer computes with: the seam between serving and the device, and the proof that it computes rightly.

Begin with `backend.py`; `first_step.py` tries one way after the other until one is right.
"""
