"""What a peer says of itself, how far it is from others, and which layers it holds of its own accord.

Begin with `announcer.py`; `placing.py` chooses layers and `prober.py` measures round trips.
"""
