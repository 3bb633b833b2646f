"""How long devices that nobody has here take for models that nobody loads here: a roofline, and measured profiles.

Begin with `devices.py`; `model_shapes.py` has the models and `named_devices.py` the names.
"""
