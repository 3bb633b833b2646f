"""Tokenizing and chat templates off the event loop; those of strangers in processes with limits.

Begin with `text_work.py`; `text_processes.py` is for models of strangers.
"""
