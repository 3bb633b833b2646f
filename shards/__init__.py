"""What a peer computes with: spans of causal language models, where their weights come from, and text.

Begin with `spec.py`, what a model is and what is asked of it; then `batching/engine.py`, which runs it, and
`loading/loader.py`, which brings it in.
"""
