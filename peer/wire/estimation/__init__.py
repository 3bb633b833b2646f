"""How fast a line is, how long its queue, and when decode needs it next, learnt from acknowledgements. Pure.

Begin with `estimator.py`; `bottleneck_model.py` models the queue and `slow_start.py` finds the rate of a new line.
"""
