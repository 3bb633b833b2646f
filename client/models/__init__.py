"""From what a user calls a model to its description and tokenizer, from this machine or from peers by hash.

Begin with `model_resolver.py`; `fetching.py` takes files from strangers.
"""
