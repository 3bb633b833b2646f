"""What the files of a model say, before anything of it is loaded: its identity, its dimensions, its tensors' names.

Begin with `manifest.py`, the value that identifies a model, and `store.py`, which describes a folder by it.
"""
