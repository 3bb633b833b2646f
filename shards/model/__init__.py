"""A causal language model of which only a span of layers is there, whatever its architecture.

Begin with `stage.py`, the loaded span; `partial_model.py` cuts it out, `probe.py` finds out what its layers cache, and
`tensor_parallel.py` divides them over the ranks of a peer.
"""
