"""From a folder's or a hub's tensors to a stage that runs, of which only the span's tensors are read.

Begin with `loader.py`; `stage_builder.py` has transformers make the model, `self_check.py` tries its kind beforehand.
"""
