"""Steps of many sessions together: packed, padded or in rows, recorded or launched, whole prompts or parts of them.

Begin with `engine.py`, whose `step` is what a peer does; `decode.py` has the recorded steps of a GPU.
"""
