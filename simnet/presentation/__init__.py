"""What all commands take, print and write: an experiment's options, its table, figures and report.

Begin with `experiments.py` and `results.py`; `tables.py` and `figures.py` are the descriptions.
"""
