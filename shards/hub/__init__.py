"""Models of a Hugging Face hub, of which only the bytes that are asked for are fetched, and each only once.

Begin with `hub_weights.py`, the tensors of a span; `hub.py` is what is asked of the server.
"""
