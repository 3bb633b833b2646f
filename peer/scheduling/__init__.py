"""What steps together, how prompts are cut, and how much may be on its way. Pure decisions.

Begin with `microbatch.py`, the queue of steps; `prefill_slices.py` cuts what is computed beside decode.
"""
