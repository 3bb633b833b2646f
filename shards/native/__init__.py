"""What only code for this very processor does fast: decode steps of few sessions, where a compiler is
installed.

Begin with `few_rows.c`: its products read weights as fast as memory delivers them. `compiling.py` makes a library of
it, and `few_rows.py` calls it; where either cannot be done, torch's products are used as before.
"""
