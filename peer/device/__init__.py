"""The machine: its processors and graphics cards, what can use them, and how much of them a peer may take.

Begin with `device.py`; `torch_builds.py` says what to install where torch cannot use a card.
"""
